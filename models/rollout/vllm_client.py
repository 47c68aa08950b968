"""Calls of one vLLM server, with what goes wrong told apart: what passes (Lost), and what the user must mend."""

import os
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr

from data.errors import UserError
from models.rollout.dispatch import Lost
from models.settings import without_secret

KEY_VARIABLE = "VLLM_API_KEY"
CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 300.0
"""For calls that load weights."""
REASON_CHARACTERS = 400


def api_key() -> SecretStr | None:
    """The key that servers ask for, from the environment; it is never part of settings, logs or messages."""
    value = os.environ.get(KEY_VARIABLE)
    return SecretStr(value) if value else None


@dataclass(frozen=True)
class ServedModel:
    """What a server offers."""

    name: str
    """By which the base is asked for."""
    root: str
    """What it was loaded from."""
    context: int
    adapters: frozenset[str]
    """Names of loaded adapters."""


class Refused(Exception):
    """The server's answer is no: status and reason. Callers say what it means."""

    def __init__(self, status: int, reason: str):
        super().__init__(f"{status} {reason}")
        self.status, self.reason = status, reason


class VLLMClient:
    """One server. Close it with `aclose`."""

    def __init__(self, url: str, row_timeout: float, connections: int):
        self.name = without_secret(url)
        key = api_key()
        self.row_timeout = row_timeout
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key.get_secret_value()}"} if key else {},
            limits=httpx.Limits(max_connections=connections + 2, max_keepalive_connections=connections + 2),
            timeout=httpx.Timeout(CONTROL_SECONDS, connect=CONNECT_SECONDS),
            trust_env=not _loopback(url),  # a proxy of the environment never leads to this machine
        )

    async def aclose(self) -> None:
        """Drops all connections; the server ends what it still samples for them."""
        await self._http.aclose()

    async def model(self) -> ServedModel:
        """What is served. Raises Lost, UserError for a refused key or an address that is no vLLM server."""
        try:
            answer = await self.call("GET", "/v1/models")
            entries = answer["data"]
            base = next(entry for entry in entries if not entry.get("parent"))
            adapters = frozenset(entry["id"] for entry in entries if entry.get("parent"))
            return ServedModel(base["id"], str(base["root"]), int(base["max_model_len"]), adapters)
        except (KeyError, TypeError, ValueError, StopIteration) as error:
            raise UserError(
                f"{self.name} does not answer as a vLLM server does ({error!r}); check engine.urls"
            ) from None
        except Refused as error:
            raise UserError(f"{self.name} refused to say what it serves ({error}); check engine.urls") from None

    async def version(self) -> str:
        """The server's version of vLLM; "unknown" where it does not tell."""
        try:
            return str((await self.call("GET", "/version"))["version"])
        except (Refused, KeyError, TypeError):
            return "unknown"

    async def has(self, path: str) -> bool:
        """Whether the server knows a call (any answer but "no such path")."""
        try:
            await self.call("GET", path)
        except Refused as error:
            return error.status != 404
        return True

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The first choice of /v1/completions."""
        answer = await self.call("POST", "/v1/completions", body, self.row_timeout)
        try:
            return answer["choices"][0]
        except (KeyError, IndexError, TypeError):
            raise Lost(f"{self.name} sent an answer without a completion") from None

    async def call(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> Any:
        """The JSON (or text) of a call.

        Raises Lost for a failed connection, no answer in time, 429 and 5xx; UserError for a refused key; Refused for
        other refusals, and for a 500 that says why.
        """
        options: dict[str, Any] = (
            {} if timeout is None else {"timeout": httpx.Timeout(timeout, connect=CONNECT_SECONDS)}
        )
        try:
            response = await self._http.request(method, path, json=body, **options)
        except httpx.TimeoutException as error:
            limit = timeout or CONTROL_SECONDS
            raise Lost(f"{self.name} gave no answer within {limit:g} s ({type(error).__name__})") from None
        except httpx.TransportError as error:
            raise Lost(f"{self.name} cannot be reached ({type(error).__name__}: {error})") from None
        if response.status_code in (401, 403):
            raise UserError(
                f"{self.name} refused the API key; set the environment variable {KEY_VARIABLE} to the server's key"
            )
        if response.status_code == 429 or response.status_code >= 500:
            reason = _reason(response)
            if path.endswith("_lora_adapter"):
                raise Refused(response.status_code, reason)
            raise Lost(f"{self.name} answered {response.status_code}: {reason}")
        if response.status_code >= 300:
            raise Refused(response.status_code, _reason(response))
        if "json" not in response.headers.get("content-type", ""):
            return response.text
        try:
            return response.json()
        except ValueError:
            raise Lost(f"{self.name} sent an answer that is not JSON") from None


def _reason(response: httpx.Response) -> str:
    try:
        text = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = response.text
    return str(text)[:REASON_CHARACTERS]


def _loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
