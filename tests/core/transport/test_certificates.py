"""`bridge.core.transport.certificates`: what certificates can be made for."""

from pathlib import Path

import pytest

from bridge.core.transport.certificates import make_certificates
from bridge.errors import SettingError


def test_a_name_in_another_script_is_in_the_certificate_as_dns_has_it(tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509")
    paths = make_certificates(tmp_path, ["bücher.lan"])
    certificate = x509.load_pem_x509_certificate(paths["server.pem"].read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "xn--bcher-kva.lan" in names.get_values_for_type(x509.DNSName)


@pytest.mark.parametrize(
    ("names", "days", "text"),
    [
        (["ü" * 70], 30, "expected the name of a host, got 'üüü"),
        (["ü..lan"], 30, "expected the name of a host"),
        ([], 1e9, r"expected days to end before the year 10000, got 1000000000\.0"),
        ([""], 1.0, "expected names and addresses such as gpu-box.lan or 192.168.1.20, got ''"),
        (["gpu box"], 1.0, "got 'gpu box'"),
        ([], 1e7, "expected days to end before the year 10000"),
        ([], float("inf"), "expected days to end before the year 10000, got inf"),
        ([], float("nan"), "expected days to be positive"),
    ],
)
def test_what_fits_no_certificate_is_refused_and_nothing_is_written(
    names: list[str], days: float, text: str, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(SettingError, match=text):
        make_certificates(tmp_path, names, days=days)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match=r"cannot make the folder '.*file': File exists. Expected one that is there"):
        make_certificates(tmp_path / "file")
