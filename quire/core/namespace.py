"""Namespace: whose cached tokens a request may use and add to."""

import msgspec


class Namespace(msgspec.Struct, frozen=True):
    """A root key of the prefix index: KV computed under one is never read under another.

    tenant: derived by the server from the credential, never from the body. salt: `cache_salt` of the body, which
    narrows it. deterministic: KV of deterministic requests is computed by other kernels and has other bits.
    """

    tenant: str = ""
    salt: str = ""
    adapter: str = ""
    deterministic: bool = False


NO_NAMESPACE = Namespace()  # that of the one tenant of a server without keys, and of offline use
