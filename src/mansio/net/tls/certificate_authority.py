"""Certificate authority of a broker's own: its key and certificate, and the certificates that it issues, as PEM.

Used by a protected start only; needs the extra `secure`. Keys are P-256. A text that has a certificate has the key of
it, too, so that both are replaced together.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final

from mansio.errors import ConfigError
from mansio.host.extras import require_extra

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DAYS: Final = 3_650
CERTIFICATE_DAYS: Final = 397
RENEWAL_DAYS: Final = 30
"""A certificate that expires within this time is renewed."""
CLOCK_SKEW: Final = timedelta(hours=1)
"""Time by which the clock of a client may be late."""


class CertificateAuthority:
    """An authority whose key this process has. `pem`: its key and its certificate."""

    def __init__(self, pem: bytes) -> None:
        """Raise `ConfigError` if `pem` does not have a key and its certificate, and `MissingExtra`."""
        require_extra("secure")
        self.pem = pem
        self._key, self._certificate = _parse(pem)

    @classmethod
    def create(cls, now: datetime) -> CertificateAuthority:
        """Create an authority with a new key. Raises `MissingExtra`."""
        require_extra("secure")
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"Mansio CA {x509.random_serial_number():040x}"[:30])
        builder = (
            _builder(name, key, now, AUTHORITY_DAYS)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(is_authority=True), critical=True)
        )
        return cls(_signed(builder, key, key))

    @property
    def certificate(self) -> bytes:
        """The certificate of this authority, which clients trust, as PEM."""
        return _encode(self._certificate)

    def issue(self, names: Iterable[str], now: datetime) -> bytes:
        """Issue a certificate with a new key for these host names and IP addresses."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            _builder(_name("Mansio broker"), key, now, CERTIFICATE_DAYS)
            .issuer_name(self._certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([_general_name(name) for name in sorted(names)]), critical=False
            )
            .add_extension(authority_key, critical=False)
        )
        return _signed(builder, key, self._key)

    def renewal_reason(self, pem: bytes, names: Iterable[str], now: datetime) -> str:
        """Return why a certificate that this authority shall have issued for `names` has to be replaced; empty if it
        need not be."""
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature

        try:
            _, certificate = _parse(pem)
        except ConfigError as error:
            return error.message
        try:
            certificate.verify_directly_issued_by(self._certificate)
        except (InvalidSignature, ValueError, TypeError):
            return "another authority has issued it"
        if certificate.not_valid_after_utc - now < timedelta(days=RENEWAL_DAYS):
            return f"it expires within {RENEWAL_DAYS} days"
        try:
            known = set(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
        except x509.ExtensionNotFound:
            known = set()
        missing = [name for name in sorted(names) if _general_name(name) not in known]
        return f"it is not for {missing[0]}" if missing else ""


def utc_now() -> datetime:
    """Return the time of the wall clock."""
    return datetime.now(UTC)


def _parse(pem: bytes) -> tuple[EllipticCurvePrivateKey, x509.Certificate]:
    """Return the key and the certificate of a text. Raises `ConfigError`."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(pem, None)
        certificate = x509.load_pem_x509_certificate(pem)
    except (ValueError, TypeError):
        raise ConfigError("it has no private key and certificate in PEM") from None
    if not isinstance(key, EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigError("its private key does not fit its certificate")
    return key, certificate


def _name(common_name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(name.partition("%")[0]))
    except ValueError:
        return x509.DNSName(name.lower())


def _builder(
    name: x509.Name, key: EllipticCurvePrivateKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(
    builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey, signer: EllipticCurvePrivateKey
) -> bytes:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    encoded_key = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return encoded_key + _encode(builder.sign(signer, hashes.SHA256()))


def _encode(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)
