"""Seeds that depend on what a draw is for, never on when or with what it is drawn."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed from `parts` (run seed, policy version, start state, sample, ...): equal parts, equal seed."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
