"""Secrets keys: what is encrypted is decrypted with the same key for the same purpose only; nothing shows a secret."""

from __future__ import annotations

import pytest

from mansio.errors import ConfigError, MansioError, SecurityDisabled, StorageError
from mansio.state.authentication.secrets_keys import EncryptedSecret, SecretsKeys

FIRST, SECOND = bytes(range(32)), bytes(range(32, 64))
NONCE = bytes(12)
SECRET = b"the secret"


def test_a_secret_is_decrypted_for_what_it_was_encrypted_for_only() -> None:
    keys = SecretsKeys((FIRST,))
    encrypted = keys.encrypt(SECRET, "alice", NONCE)
    assert keys.decrypt(encrypted, "alice") == SECRET
    assert SECRET not in encrypted.ciphertext
    with pytest.raises(StorageError):
        keys.decrypt(encrypted, "bob")
    for changed in (
        encrypted._replace(nonce=bytes(11) + b"1"),
        encrypted._replace(nonce=b""),
        encrypted._replace(ciphertext=bytes([encrypted.ciphertext[0] ^ 1]) + encrypted.ciphertext[1:]),
        encrypted._replace(ciphertext=b""),
    ):
        with pytest.raises(StorageError):
            keys.decrypt(changed, "alice")


def test_a_new_key_encrypts_while_the_one_before_still_decrypts() -> None:
    old = SecretsKeys((FIRST,))
    encrypted = old.encrypt(SECRET, "alice", NONCE)
    rolled = SecretsKeys((SECOND, FIRST))
    assert rolled.decrypt(encrypted, "alice") == SECRET
    assert rolled.encrypt(SECRET, "alice", NONCE).key_id == rolled.present_id != encrypted.key_id
    assert rolled.has(old.present_id)
    with pytest.raises(SecurityDisabled, match=old.present_id):
        SecretsKeys((SECOND,)).decrypt(encrypted, "alice")


def test_keys_of_different_purposes_and_of_different_secrets_keys_differ() -> None:
    keys = SecretsKeys((FIRST, SECOND))
    ids = (keys.present_id, SecretsKeys((SECOND,)).present_id)
    derived = {keys.derive(purpose, key_id) for purpose in (b"a", b"b") for key_id in ids}
    assert len(derived | {FIRST, SECOND}) == 6


def test_derivation_is_hkdf_of_rfc_5869() -> None:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    keys = SecretsKeys((FIRST,))
    expected = HKDF(SHA256(), 32, salt=None, info=b"purpose").derive(FIRST)
    assert keys.derive(b"purpose", keys.present_id) == expected


def test_a_file_has_one_key_on_each_line() -> None:
    text = f"# present\n{SECOND.hex()}\n\n{FIRST.hex().upper()}\r\n"
    assert SecretsKeys.parse(text).present_id == SecretsKeys((SECOND,)).present_id
    assert SecretsKeys.parse(text).has(SecretsKeys((FIRST,)).present_id)


@pytest.mark.parametrize("text", ["", "# none\n", "abc", FIRST.hex()[:-1], FIRST.hex() + "0", "g" * 64])
def test_a_file_with_anything_else_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        SecretsKeys.parse(text)
    assert not text.strip() or text.strip() not in str(refused.value)


def test_nothing_shows_a_key_or_a_secret() -> None:
    keys = SecretsKeys((FIRST,))
    damaged = EncryptedSecret(keys.present_id, NONCE, b"damaged" * 5)
    with pytest.raises(MansioError) as refused:
        keys.decrypt(damaged, "alice")
    assert refused.value.__context__ is None
    assert FIRST.hex() not in repr(keys) + str(refused.value)
    for wrong in ((), (b"short",)):
        with pytest.raises(ValueError, match="32 bytes"):
            SecretsKeys(wrong)
    with pytest.raises(ValueError, match="12 bytes"):
        keys.encrypt(SECRET, "alice", b"")
