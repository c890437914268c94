"""Certificates for tests: a root of our own, and what it signs for this machine."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_OTHER_USES = (
    "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
    "encipher_only decipher_only"
)
_USAGE_OF_ROOT = x509.KeyUsage(
    key_cert_sign=True, crl_sign=True, **dict.fromkeys(_OTHER_USES.split(), False)
)


@dataclass(frozen=True)
class Signed:
    certificate: Path
    key: Path


class Root:
    """A certificate authority; ``path`` is what those who trust it need."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._key = folder, ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
        self.path = folder / "root.pem"
        made = (
            self._certificate(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_USAGE_OF_ROOT, critical=True)
        )
        self.path.write_bytes(_pem(made.sign(self._key, hashes.SHA256())))

    def sign(self, name: str, passphrase: bytes | None = None, *others: str) -> Signed:
        """Make a key and a certificate for localhost, 127.0.0.1 and other addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        addresses = map(ipaddress.ip_address, ("127.0.0.1", *others))
        names = [x509.DNSName("localhost"), *map(x509.IPAddress, addresses)]
        made = self._certificate(subject, key.public_key()).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        signed = Signed(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        signed.certificate.write_bytes(_pem(made.sign(self._key, hashes.SHA256())))
        how = (
            serialization.BestAvailableEncryption(passphrase)
            if passphrase
            else serialization.NoEncryption()
        )
        encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        signed.key.write_bytes(key.private_bytes(encoding, form, how))
        signed.key.chmod(0o600)
        return signed

    def _certificate(self, subject, key):
        """Begin one with the identifiers of keys that Python 3.13 demands."""
        now = datetime.now(UTC)
        issuers = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(issuers, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
