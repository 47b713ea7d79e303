"""weights_digest: a name that no other weights have, for stores."""

import hashlib
from typing import Any


def weights_digest(model: Any) -> str:
    """Return the model's class and a SHA-256 over the config and a few numbers of each weight."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, weight in model.named_parameters():
        digest.update(name.encode())
        digest.update(weight.detach().flatten()[:64].float().cpu().numpy().tobytes())
    return f"{type(model).__name__} {digest.hexdigest()[:16]}"
