"""Encryption of secrets in the metadata store, with keys that are not in it: AES-256-GCM (NIST SP 800-38D).

A broker has its secrets keys from the file `secrets_key_file`. The first one encrypts; the others are for what was
encrypted before the first one was added. A secret is stored with the id of its key. The keys for each purpose are
derived (HKDF, RFC 5869), so no secrets key encrypts or signs anything itself. Encryption needs the extra `secure`.

Invariants: callers pass the nonces, each of which is used once. No error and no `repr` contains a key or a secret.
"""

from __future__ import annotations

import hmac
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.errors import ConfigError, SecurityDisabled, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
KEYS_MAX: Final = 16

_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")
_ID: Final = b"mansio secrets key id"
_ENCRYPTION: Final = b"mansio encrypted secrets"
_ID_CHARACTERS: Final = 16


class EncryptedSecret(NamedTuple):
    """A secret as the metadata store has it. `key_id`: of the secrets key."""

    key_id: str
    nonce: bytes
    ciphertext: bytes


class SecretsKeys:
    """The secrets keys of a broker."""

    __slots__ = ("_ids", "_keys", "present_id")

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        """`keys`: of `KEY_BYTES` bytes each; the first one encrypts. Raises `ValueError` without a key, or for one of
        another length."""
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"there is at least one secrets key, and each has {KEY_BYTES} bytes")
        self._keys: Mapping[str, bytes] = {
            _derived(key, _ID).hex()[:_ID_CHARACTERS]: key for key in reversed(keys)
        }
        self.present_id: str = _derived(keys[0], _ID).hex()[:_ID_CHARACTERS]
        """Id of the key that encrypts."""

    def __repr__(self) -> str:
        return "SecretsKeys(hidden)"

    @classmethod
    def parse(cls, text: str) -> SecretsKeys:
        """Parse the content of a key file: a key of 64 hexadecimal digits on each line; lines that begin with # are
        comments. Raises `ConfigError`."""
        lines = [line.strip() for line in text.splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not 1 <= len(found) <= KEYS_MAX or not all(_KEY.fullmatch(line) for line in found):
            raise ConfigError(
                f"it has 1 to {KEYS_MAX} keys, each a line of {2 * KEY_BYTES} hexadecimal digits"
            )
        return cls(tuple(dict.fromkeys(bytes.fromhex(line) for line in found)))

    def has(self, key_id: str) -> bool:
        """Whether a key is one of these."""
        return key_id in self._keys

    def encrypt(self, secret: bytes, context: str, nonce: bytes) -> EncryptedSecret:
        """Encrypt a secret. `context`: what it is for; it is decrypted with the same one only. `nonce`: `NONCE_BYTES`
        unpredictable bytes that are used once."""
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # takes a moment; extra `secure`

        cipher = AESGCM(self.derive(_ENCRYPTION, self.present_id))
        return EncryptedSecret(
            self.present_id, nonce, cipher.encrypt(nonce, secret, context.encode("utf-8", "surrogatepass"))
        )

    def decrypt(self, encrypted: EncryptedSecret, context: str) -> bytes:
        """Decrypt a secret. Raises `SecurityDisabled` if its key is missing, `StorageError` if it was changed, or is
        for something else."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        cipher = AESGCM(self.derive(_ENCRYPTION, encrypted.key_id))
        try:
            return cipher.decrypt(
                encrypted.nonce, encrypted.ciphertext, context.encode("utf-8", "surrogatepass")
            )
        except (InvalidTag, ValueError):
            pass
        raise StorageError(f"the secret of {context} is damaged")

    def derive(self, purpose: bytes, key_id: str) -> bytes:
        """Return a key of 32 bytes for one purpose. Raises `SecurityDisabled` if the secrets key is missing."""
        key = self._keys.get(key_id)
        if key is None:
            raise SecurityDisabled(f"secrets_key_file has no key with the id {key_id}")
        return _derived(key, purpose)


def _derived(key: bytes, purpose: bytes) -> bytes:
    """HKDF-SHA-256 without salt, one block of output."""
    extracted = hmac.digest(bytes(32), key, "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")
