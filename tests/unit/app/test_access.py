"""Keys with their options and rates, callers by address, and the files of TLS."""

import hashlib
import ipaddress
import ssl
from contextlib import suppress
from dataclasses import replace

import pytest

from app.access import (
    ANYONE,
    MAX_ADDRESSES,
    Caller,
    CertificateError,
    ClientTls,
    Keys,
    TokenBucket,
    key_headers,
    read_keys,
)
from app.errors import ForbiddenError, RateLimitedError
from app.setting_values import ApiKeyError, keys_in
from tests.support.cases import cases
from tests.support.certificates import Root, Signed
from tests.support.hand_clock import HandClock

KEY, OTHER = "k" * 32, "o" * 32


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return Root(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def signed(root: Root) -> Signed:
    return root.sign("client")


def test_without_files_each_library_has_its_own_way():
    assert ClientTls().context() is None


def test_the_roots_given_are_the_ones_trusted(root):
    context = ClientTls(roots=root.path).context()
    assert context is not None
    assert len(context.get_ca_certs()) == 1
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


def test_a_certificate_with_its_key_beside_it_or_in_it(root, signed, tmp_path):
    assert ClientTls(root.path, signed.certificate, signed.key).context()
    both = tmp_path / "both.pem"
    both.write_bytes(signed.certificate.read_bytes() + signed.key.read_bytes())
    assert ClientTls(certificate=both).context()


def test_a_key_alone(signed):
    with pytest.raises(CertificateError, match=r"a key without its certificate: .*client\.key"):
        ClientTls(key=signed.key).context()


def test_files_that_cannot_be_used(root, signed, tmp_path):
    text, other = tmp_path / "text", root.sign("other")
    text.write_text("no certificate")
    hidden = root.sign("hidden", passphrase=b"secret")
    for tls, told in (
        (ClientTls(roots=tmp_path / "nothing"), r"^cannot use --ca .*nothing: No such file or dir"),
        (ClientTls(roots=text), r"^cannot use --ca .*text: no certificate and key in PEM"),
        (ClientTls(certificate=text), r"--client-cert .*text: no certificate and key in PEM"),
        (ClientTls(None, signed.certificate, other.key), "the key is not the certificate's"),
        (ClientTls(None, hidden.certificate, hidden.key), "openssl pkey"),
    ):
        with pytest.raises(CertificateError, match=told):
            tls.context()


@cases(
    "in_file, variable, sent",
    (None, None, None),
    (f"# mine\n{KEY}\n{OTHER}\n", None, KEY),
    (f"team-a:{KEY}\n", None, KEY),  # its name is not sent
    (None, f" {OTHER}\n", OTHER),
    (KEY, f" {OTHER}\n", KEY),
)
def test_the_key_of_the_file_or_else_of_the_variable(
    tmp_path, monkeypatch, in_file, variable, sent
):
    monkeypatch.setenv("TANDEM_API_KEY", variable or "")
    if in_file is not None:
        (tmp_path / "key").write_text(in_file)
    headers = key_headers(None if in_file is None else tmp_path / "key")
    assert headers == ({} if sent is None else {"authorization": f"Bearer {sent}"})


def test_what_is_no_key_is_not_shown(monkeypatch):
    monkeypatch.setenv("TANDEM_API_KEY", "not a key, yet a secret of somebody")
    with pytest.raises(ApiKeyError, match="TANDEM_API_KEY, line 1") as refused:
        key_headers(None)
    assert "secret" not in str(refused.value)


ALL = Caller("ann", has_key=True)
LIMITED = replace(
    ALL, share=2.5, lane="bulk", sets=frozenset({"a", "b"}), is_admin=False, rate=50.0, burst=100.0
)
OPTIONS = "rate=50,burst=100, share = 2.5 ,lane=bulk,sets=a|b"
MAPPING = "\n  rate: 50\n  burst: 100\n  share: 2.5\n  lane: bulk\n  sets: [a, b]"


@cases(
    "text, caller",
    (KEY, Caller("unnamed", has_key=True)),
    (f"ann:{KEY}", ALL),
    (f"ann:{KEY}:{OPTIONS}", LIMITED),
    (f"ann:{KEY}:{OPTIONS},admin", replace(LIMITED, is_admin=True)),
    (f"ann:{KEY}:admin=no", replace(ALL, is_admin=False)),
    (f"ann:{KEY}:rate=0.2", replace(ALL, is_admin=False, rate=0.2, burst=1.0)),
    (f"# ours\n- key: {KEY}\n  name: ann{MAPPING}\n", LIMITED),
    (f"[{{name: ann, key: {KEY}}}]", ALL),
    (f"[{{name: ann, key: {KEY}, admin: null}}]", ALL),
)
def test_a_key_and_its_options_in_either_form(text, caller):
    assert Keys(keys_in(text, "keys")).caller_of(KEY.encode()) == caller


SECRET = "secret-" * 5


@cases(
    "text, says",
    (f"ann:{SECRET}:rate=0", "keys, line 1: rate: Input should be greater than 0"),
    (f"ann:{SECRET}:rate=secret", "line 1: rate: Input should be a valid number"),
    (f"ann:{SECRET}:rate", "line 1: rate: Input should be a valid number"),
    (f"ann:{SECRET}:sets=", "line 1: sets: Input should be a valid frozenset"),
    (f"ann:{SECRET}:burst=2", "line 1: burst is there and rate is not"),
    (f"ann:{SECRET}:lane=fast", "line 1: lane: Input should be 'interactive' or 'bulk'"),
    (f"ann:{SECRET}:share=1000", "line 1: share: Input should be less than or equal to 100"),
    (f"ann:{KEY}:{SECRET}", "line 1: an entry is key, name and the options rate, burst, share"),
    (f"ann:{KEY}\nann:{SECRET}:rate=1", "keys: the keys named ann differ in their options"),
    (f"- key: {SECRET}\n  rate: 1", "entry 1: a key with options has a name"),
    (f"- {{key: {KEY}}}\n- {{key: secret, name: b}}", "entry 2: a key of 6 characters"),
    (f"- {SECRET}", "entry 1: an entry is key, name and the options"),
    (f"- name: ann\n  {SECRET}: x\n", "keys, entry 1: "),
    (f"- {{key: {SECRET}\n- x: [", "keys, line 2: this is not YAML"),
    (f"- key: {SECRET}\n  key: {SECRET}", "keys, line 2: this is not YAML"),
    (f"--- {{key: {SECRET}}}", "keys in YAML are a list of mappings"),
)
def test_a_mistake_is_named_by_its_place_without_the_key(text, says):
    with pytest.raises(ApiKeyError) as refused:
        keys_in(text, "keys")
    assert says in refused.value.message
    assert "secret" not in refused.value.message


def test_a_variable_has_keys_with_options_too(monkeypatch):
    monkeypatch.setenv(
        "TANDEM_API_KEYS", f"ann:{KEY}:rate=5,burst=9, admin,bob:{OTHER}:admin\nadmin{'x' * 32}"
    )
    keys = read_keys(None)
    assert [keys.caller_of(key.encode()) for key in (KEY, OTHER)] == [
        replace(ALL, rate=5.0, burst=9.0),
        replace(ALL, name="bob"),
    ]
    assert len(keys) == 3


def test_hashes_are_of_the_keys_alone():
    assert Keys([f"ann:{KEY}:rate=5"]).hashes() == (hashlib.sha256(KEY.encode()).hexdigest(),)


def test_the_key_of_a_command_is_the_first_one_without_its_options(tmp_path):
    (tmp_path / "keys").write_text(f"- {{name: ann, key: {KEY}, rate: 5}}")
    assert key_headers(tmp_path / "keys") == {"authorization": f"Bearer {KEY}"}


def test_a_bucket_grants_a_burst_and_then_the_rate():
    bucket = TokenBucket(3.0, 0.0)
    assert [bucket.take(2.0, 3.0, now) for now in (0.0, 0.0, 0.0, 0.0)] == [0, 0, 0, 0.5]
    assert bucket.take(2.0, 3.0, 0.25) == pytest.approx(0.25)  # a refusal costs nothing
    assert bucket.take(2.0, 3.0, 0.5) == 0
    granted = sum(not bucket.take(2.0, 3.0, 0.5 + number / 100) for number in range(1001))
    assert granted == 20  # of 10 s
    assert [bucket.take(2.0, 3.0, 99.0) for _ in range(4)] == [0, 0, 0, 0.5]
    assert bucket.take(10.0, 3.0, 99.1) == 0  # a new rate holds at once


def test_keys_of_one_name_share_its_rate_and_the_refusal_says_which_limit_and_when():
    clock = HandClock()
    keys = Keys([f"ann:{KEY}:rate=0.5,burst=2", f"ann:{OTHER}:rate=0.5,burst=2"], clock=clock)
    first, second = (keys.check([f"Bearer {key}"]) for key in (KEY, OTHER))
    policy = {"ratelimit-policy": '"requests";q=2;w=4'}
    assert keys.take(first) == policy | {"ratelimit": '"requests";r=1;t=2'}
    assert keys.take(second) == policy | {"ratelimit": '"requests";r=0;t=4'}
    clock.now += 0.75
    for caller in (first, second):
        with pytest.raises(
            RateLimitedError, match=r"key ann may .* 0\.5 .* and 2 at once"
        ) as refused:
            keys.take(caller)
    assert refused.value.retry_after_s == 1.25
    assert refused.value.headers == policy | {"ratelimit": '"requests";r=0;t=2'}
    clock.now += 1.25
    assert keys.take(first)


def test_several_gateways_grant_a_rate_together():
    """Each grants its part, and the whole burst. Without a number each grants the whole rate."""
    clock, granted = HandClock(), dict.fromkeys(("3", "", "0", "-3", "3.0", "99999"), 0)
    for gateways in granted:
        keys = Keys([f"ann:{KEY}:rate=6,burst=2"], clock=clock)
        caller = keys.check([f"Bearer {KEY}"])
        for _ in range(1000):  # 10 s
            with suppress(RateLimitedError):
                keys.take(caller, gateways)
                granted[gateways] += 1
            clock.now += 0.01
    assert granted == dict.fromkeys(granted, 61) | {"3": 21}


def test_a_name_with_two_limits_has_a_bucket_for_each():
    keys = Keys([f"ann:{KEY}:rate=1", f"ann:{OTHER}:rate=1000"], clock=HandClock())
    slow, quick = (keys.check([f"Bearer {key}"]) for key in (KEY, OTHER))
    keys.take(slow)
    keys.take(quick)
    with pytest.raises(RateLimitedError):
        keys.take(slow)


def test_a_caller_without_limits_may_do_all():
    ALL.check_admin()
    ALL.check_set("any")
    LIMITED.check_set("a")
    with pytest.raises(ForbiddenError, match="the key ann may not ask c; name one of a, b"):
        LIMITED.check_set("c")


PROXIES = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "::1/128")))


@cases(
    "address, forwarded, name",
    ("192.0.2.1", "", "192.0.2.1"),
    ("192.0.2.1", "203.0.113.9", "192.0.2.1"),  # who is no proxy may say what it likes
    ("10.0.0.1", "203.0.113.9, 198.51.100.7,10.0.0.2", "198.51.100.7"),
    ("10.0.0.1", "198.51.100.7, nonsense", "10.0.0.1"),
    ("10.0.0.1", "", "10.0.0.1"),
    ("::1", "2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
    ("::ffff:10.0.0.1", "::ffff:192.0.2.1", "192.0.2.1"),
    ("", "192.0.2.1", ANYONE.name),
    ("unix:", "192.0.2.1", ANYONE.name),
)
def test_without_keys_a_caller_is_its_address(address, forwarded, name):
    keys = Keys([], proxies=PROXIES)
    caller = keys.check([], address, forwarded)
    assert (caller.name, caller.is_admin, caller.has_key) == (name, True, False)
    assert keys.check([], address, forwarded) is caller  # made once
    keys.ended(caller, 200)
    assert keys.figures == {}  # an address is no name of a metric


def test_addresses_are_forgotten_rather_than_kept_without_end():
    keys = Keys([])
    for number in range(MAX_ADDRESSES + 10):
        keys.check([], str(ipaddress.IPv4Address(number)))
    assert len(keys.by_address) == 10
    keys = Keys([], proxies=PROXIES)
    for number in range(10):  # of who is no proxy
        keys.check([], "192.0.2.1", f"203.0.113.{number}")
    assert len(keys.by_address) == 1
