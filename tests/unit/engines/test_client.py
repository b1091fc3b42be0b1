"""The HTTP client of engines: trusted certificates are loaded once, and only where they count."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.engines.client import Client, certificates
from paceline.errors import EngineError


@pytest.fixture(autouse=True)
def _nothing_loaded() -> Iterator[None]:
    certificates.cache_clear()
    yield
    certificates.cache_clear()


def test_clients_share_their_certificates():
    for _ in range(3):
        Client("https://example.invalid").close()
    assert certificates.cache_info().misses == 1


@pytest.mark.parametrize("content", [None, ""])
def test_a_wrong_file_of_certificates_is_one_line(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "certificates.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(EngineError) as caught:
        Client("https://example.invalid")
    said = str(caught.value)
    assert f"cannot read trusted certificates from {file}" in said
    assert "\n" not in said
    Client("http://127.0.0.1:9").close()  # the environment is of no concern to this machine
