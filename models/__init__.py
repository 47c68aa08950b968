"""The policy, its losses, rollout engines and LoRACoE. Only this room imports torch; it knows no prefect."""
