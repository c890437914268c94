"""The key that a client sends: from a file, from the environment, never from the command line."""

import pytest

from app.access import ApiKeyError, key_headers

KEY, OTHER = "k" * 32, "o" * 32


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    return monkeypatch


def test_without_a_key_nothing_is_sent():
    assert key_headers(None) == {}


def test_the_files_first_key(tmp_path):
    path = tmp_path / "key"
    path.write_text(f"# mine\n{KEY}\n{OTHER}\n")
    assert key_headers(path) == {"authorization": f"Bearer {KEY}"}


def test_the_variable_and_the_file_before_it(tmp_path, environment):
    environment.setenv("TANDEM_API_KEY", f" {OTHER}\n")
    assert key_headers(None) == {"authorization": f"Bearer {OTHER}"}
    (tmp_path / "key").write_text(KEY)
    assert key_headers(tmp_path / "key") == {"authorization": f"Bearer {KEY}"}


def test_a_keys_name_is_not_sent(tmp_path):
    (tmp_path / "key").write_text(f"team-a:{KEY}\n")
    assert key_headers(tmp_path / "key") == {"authorization": f"Bearer {KEY}"}


def test_what_is_no_key_is_not_shown(environment):
    environment.setenv("TANDEM_API_KEY", "not a key, yet a secret of somebody")
    with pytest.raises(ApiKeyError, match="TANDEM_API_KEY, line 1") as refused:
        key_headers(None)
    assert "secret" not in str(refused.value)
