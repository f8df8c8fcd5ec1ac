"""An issuer of tokens: its keys, its JWKS, and tokens of any content, also ones that no library makes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, Self

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

ISSUER: Final = "https://issuer.example"
AUDIENCE: Final = "mansio"
KEY_ID: Final = "rsa-1"


@lru_cache(4)
def _rsa_key(number: int, bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


class Issuer:
    """Keys for RS256, PS256, ES256 and EdDSA. `number`: another one has other keys with the same ids."""

    def __init__(self, number: int = 0) -> None:
        self.keys: dict[str, Any] = {
            KEY_ID: _rsa_key(number),
            "ec-1": ec.generate_private_key(ec.SECP256R1()),
            "ed-1": ed25519.Ed25519PrivateKey.generate(),
        }

    def jwk(self, key_id: str = KEY_ID) -> dict[str, Any]:
        """Return one public key."""
        key = self.keys[key_id]
        kind: Any = {"rsa": RSAAlgorithm, "ec": ECAlgorithm, "ed": OKPAlgorithm}[
            key_id.split("-", maxsplit=1)[0]
        ]
        return {**json.loads(kind.to_jwk(key.public_key())), "kid": key_id, "use": "sig"}

    def jwks(self, *key_ids: str) -> bytes:
        """Return the document with these keys, or all."""
        return json.dumps({"keys": [self.jwk(each) for each in key_ids or self.keys]}).encode()

    def public_pem(self) -> bytes:
        """Return the public RSA key in PEM."""
        encoding = serialization.Encoding.PEM
        return bytes(
            self.keys[KEY_ID]
            .public_key()
            .public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)
        )

    def sign(
        self,
        claims: Mapping[str, Any],
        *,
        key_id: str = KEY_ID,
        algorithm: str = "RS256",
        headers: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a token with these claims. A header that is None is left out."""
        more = {name: each for name, each in {"kid": key_id, **(headers or {})}.items() if each is not None}
        return jwt.encode(dict(claims), self.keys[key_id], algorithm=algorithm, headers=more)


def claims(now_s: float, user: str = "alice", **more: Any) -> dict[str, Any]:
    """Return the claims of a valid token, with others for those in `more`; None: without that claim."""
    found = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": user,
        "iat": int(now_s),
        "exp": int(now_s) + 300,
        **more,
    }
    return {name: value for name, value in found.items() if value is not None}


def encode(part: bytes | Mapping[str, Any]) -> str:
    """Return base64url without padding."""
    content = part if isinstance(part, bytes) else json.dumps(part).encode()
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def unsigned(header: Mapping[str, Any], payload: Mapping[str, Any]) -> str:
    """Return a token with an empty signature."""
    return f"{encode(header)}.{encode(payload)}."


def with_hmac(header: Mapping[str, Any], payload: Mapping[str, Any], secret: bytes) -> str:
    """Return a token whose signature is an HMAC, as an attacker who knows the public key can make one."""
    signed = f"{encode(header)}.{encode(payload)}"
    return f"{signed}.{encode(hmac.digest(secret, signed.encode(), hashlib.sha256))}"


class KeyServer:
    """Serves a document over HTTP on loopback. `answers`: counts requests."""

    def __init__(self, document: bytes) -> None:
        self.document = document
        self.status = 200
        self.answers = 0
        self.bodies: list[bytes] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answers += 1
                self.send_response(outer.status)
                if outer.status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(outer.document)))
                self.end_headers()
                self.wfile.write(outer.document)

            def do_POST(self) -> None:
                outer.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/keys"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def token_settings(keys: str | Path, **more: Any) -> dict[str, Any]:
    """Return the settings of a broker that accepts tokens of the issuer besides passwords."""
    return {
        "sasl_enabled_mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,PLAIN,OAUTHBEARER",
        "sasl_oauthbearer_jwks_endpoint_url": str(keys),
        "sasl_oauthbearer_expected_issuer": ISSUER,
        "sasl_oauthbearer_expected_audience": AUDIENCE,
        "sasl_oauthbearer_groups_claim_name": "groups",
        **more,
    }
