"""HAProxy's rules: each edit finds its place in Serve's file, and HAProxy takes the result."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ray.serve._private import haproxy_templates
from ray.serve._private.haproxy import HAProxyManager

from app.errors import DeadlineError, NotReadyError, OverloadedError, RouteError, SlowBodyError
from app.grpc.call import OPEN_INFERENCE
from app.grpc.open_inference import OPEN_METHODS
from app.http.api import OPEN_BELOW, OPEN_PATHS
from app.launch import haproxy_rules
from app.launch.checks import Tls
from app.launch.haproxy import haproxy_binary
from app.launch.haproxy_rules import (
    FOLDER,
    PREFIX,
    Edit,
    MissingEditError,
    OwnService,
    RuleOptions,
    _prefix,
    backend_name,
    edit_file,
    edited,
    edits_of,
    unanchored,
    with_unkept,
)
from tests.support.haproxy_configs import CONFIG, PORTS, haproxys_errors, write_serves_config

TEMPLATE = Path(haproxy_templates.__file__).read_text("utf-8")
OPTIONS = RuleOptions(max_requests=7, origins=("https://shop.example",))
SOCKETS = (Path("http.sock"), Path("grpc.sock"))
OWN = OwnService("127.0.0.1", SOCKETS)
WITH_TLS = OwnService("127.0.0.1", SOCKETS, "crt x.pem alpn http/1.1")
OF_OWN, OF_CLUSTER = edits_of(OPTIONS, OWN), edits_of(OPTIONS, None)
EDITS = list(dict.fromkeys(edits_of(OPTIONS, WITH_TLS) + OF_CLUSTER))
ANCHORS = list(dict.fromkeys((edit.purpose, anchor) for edit in EDITS for anchor in edit.anchors))
SECTION = re.compile(r"^(global|defaults|frontend|backend|listen)\b.*", re.MULTILINE)
BACKEND = "http-tandem"
NO_APPLICATION = """\
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path not found."
"""


def sections(text: str) -> dict[str, list[str]]:
    """Return the rules of each section by its first line."""
    names = [match[0] for match in SECTION.finditer(text)]
    bodies = SECTION.split(text)[2::2]
    return {
        name: [line.strip() for line in body.splitlines() if line.strip()]
        for name, body in zip(names, bodies, strict=True)
    }


def added(options: RuleOptions, own: OwnService | None, text: str = CONFIG) -> dict[str, list[str]]:
    """Return the rules that each section has in addition to Serve's."""
    before, after = sections(text), sections(edited(text, edits_of(options, own)))
    return {
        name: [line for line in after[name] if line not in before[name] and line[0] != "#"]
        for name in before
    }


def test_serves_template_has_a_place_for_every_edit() -> None:
    assert unanchored(EDITS, TEMPLATE) == []


@pytest.mark.parametrize(("purpose", "anchor"), ANCHORS, ids=lambda value: str(value)[:40])
def test_an_edit_without_its_place_is_named(purpose: str, anchor: str) -> None:
    whole = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    without = re.sub(anchor, "# another line", whole, flags=re.MULTILINE)
    assert without != whole
    assert f"{purpose} (no line {anchor})" in unanchored(EDITS, f'TEMPLATE = """{without}"""')


AWAY, CONTROL, NAMED = "statistics away", "HAProxy's control away", "named by protocol"


@pytest.mark.parametrize(
    ("line", "other", "lost"),
    [
        *((line, f"{line} # other", lost) for line, lost in (
            ("    bind :9101", AWAY), ("  bind *:8404", AWAY),
            ("global", "size of kept buffers"), ("defaults", "time limit of headers"),
            ("backend http-tandem", NAMED), ("backend grpc-tandem", NAMED),
        )),
        ("sock mode 666 level admin", "sock level admin", CONTROL),
        ("frontend http_frontend", "frontend  http_frontend", "the address and the TLS of HTTP"),
        ("bind 127.0.0.1:8000", "bind [::]:8000", "TLS of HTTP"),
        ("bind 127.0.0.1:9000 proto h2", "bind [::]:9000 proto h2", "TLS of gRPC"),
        ("http-tandem\n    http-reuse always", "http-tandem\n    http-reuse  never", "reused"),
        ("backend http-tandem", "backend tandem-http", NAMED),
    ],
)  # fmt: skip
def test_a_file_with_another_line_than_expected_is_refused(line, other, lost):
    assert CONFIG.count(f"{line}\n") == 1
    with pytest.raises(MissingEditError, match=lost):
        edited(CONFIG.replace(f"{line}\n", f"{other}\n"), OF_OWN)


@pytest.mark.parametrize("port", [8001, 8443])
def test_a_port_in_clear_beside_tls_is_refused(port: int) -> None:
    text = CONFIG.replace("    bind *:84040\n    bind :9101 proto h2\n", "")
    edits = edits_of(OPTIONS, WITH_TLS)
    lines = sections(edited(text, edits))
    for name, words in (("http", "8000 ssl crt x.pem alpn http/1.1 maxconn 3072"),
                        ("grpc", "9000 ssl crt x.pem alpn h2 maxconn 768")):  # fmt: skip
        assert f"bind 127.0.0.1:{words}" in lines[f"frontend {name}_frontend"]
    first = "    bind 127.0.0.1:8000\n"
    with pytest.raises(MissingEditError, match="TLS on every port that others reach"):
        edited(text.replace(first, f"{first}    bind 127.0.0.1:{port}\n"), edits)


@pytest.mark.parametrize(
    ("line", "is_logged"),
    [
        *((f"option {x}", False) for x in ("splice-request", " splice-response", "splice-auto")),
        ("log 127.0.0.1:514 local0 info", False),
        ("log  127.0.0.1:514 local1 debug", False),
        ("log 127.0.0.1:514 local0 info", True),
    ],
)  # fmt: skip
def test_lines_that_go_in_any_spelling(line: str, is_logged: bool) -> None:
    text = CONFIG.replace("defaults\n", f"defaults\n    {line}\n", 1)
    assert (line in edited(text, edits_of(RuleOptions(is_logged=is_logged), OWN))) == is_logged


def test_only_our_application_has_our_rules() -> None:
    new = added(OPTIONS, OWN)
    after = sections(edited(CONFIG, OF_OWN))
    assert not new["backend http-other"] + new["backend grpc-other"]
    assert new["frontend prometheus"] == ["bind unix@metrics-page.sock mode 600"]
    assert new["listen stats"] == ["bind unix@stats-page.sock mode 600"]
    assert "bind unix@http.sock mode 600" in new["frontend http_frontend"]
    assert "bind unix@grpc.sock mode 600 proto h2" in new["frontend grpc_frontend"]
    of_grpc = [line for line in new["frontend grpc_frontend"] if line.startswith("http-request ")]
    assert all("ray.serve" in line for line in of_grpc)  # the methods of all applications
    assert "http-reuse safe" in after["backend http-tandem"]
    assert "http-reuse always" in after["backend http-other"]
    gone = re.compile(
        r"log 127|stats socket|option splice-|bind (:9101|\*:8404|127\S+:[89]000.*)$"
        r"|http-reuse always"
    )
    for name, lines in sections(CONFIG).items():
        assert [line for line in lines if line not in after[name] and not gone.match(line)] == []


def test_a_cluster_waits_for_a_gateway_as_long_as_its_operator_says() -> None:
    new = added(RuleOptions(gateway_timeout_ms=7500), None, CONFIG + NO_APPLICATION)
    for backend in ("backend http-tandem", "backend grpc-tandem"):
        assert "timeout server 7500ms" in new[backend]
    assert new["frontend prometheus"] == ["bind 127.0.0.1:9101"]  # no other machine reads them
    assert new["listen stats"] == ["bind 127.0.0.1:8404"]


@pytest.mark.parametrize("others", [None, {"http": 30000}])
def test_a_clusters_new_haproxy_is_not_ready_rather_than_ignorant(tmp_path, others):
    """Serve's answer where no application is known yet is 404, which no client tries again."""
    config = write_serves_config(tmp_path / "haproxy.cfg", others=others).read_text()
    new = added(OPTIONS, None, config)["backend default_backend"]
    if others:
        assert new == []
        return
    (line,) = new
    assert line.startswith("http-request return status 503 content-type application/json hdr")
    (text,) = re.findall(r"string '(.*)'", line)
    error = json.loads(text)["error"]
    assert error["message"] == haproxys_errors()[503, error["code"]]


def test_the_codes_are_those_of_the_services_errors() -> None:
    ours = {(405, RouteError.code), (503, NotReadyError.code), (504, DeadlineError.code)}
    assert haproxys_errors().keys() >= ours | {(SlowBodyError.status, SlowBodyError.code)}
    for file in ("http_backend.cfg", "grpc_backend.cfg", "grpc_frontend.cfg"):
        text = (FOLDER / file).read_text()
        refusals = [line for line in text.splitlines() if "try again in 1 s" in line]
        forms = (f'"code": "{OverloadedError.code}"', f"hdr error-code {OverloadedError.code}")
        assert any(form in line for line in refusals for form in forms)


def test_haproxy_knows_which_paths_need_no_key() -> None:
    """Those of a service below a prefix are below it."""
    text = (FOLDER / "http_backend.cfg").read_text()
    is_open = r"acl tandem_(?:live_path|ready_path|open) (path|path_beg) (.*)"
    paths = {kind: set[str]() for kind in ("path", "path_beg")}
    for kind, words in re.findall(is_open, text):
        paths[kind].update(words.replace(PREFIX, "").split())
    assert paths == {"path": OPEN_PATHS, "path_beg": set(OPEN_BELOW)}
    served = "    acl is_http-tandem path_beg /below/\n"
    assert _prefix(served, BACKEND) == "/below"
    assert _prefix(served.replace("/below", ""), BACKEND) == ""


def test_both_protocols_check_keys_by_the_same_rule() -> None:
    texts = [(FOLDER / f"{name}_backend.cfg").read_text() for name in ("http", "grpc")]
    http, grpc = (re.findall(r".*,map\(.*", text) for text in texts)
    assert len(http) == 1
    assert http == grpc
    assert re.findall(r"tandem_open path(.*)", texts[1])[1].split() == [
        f"/{OPEN_INFERENCE}/{method}" for method in sorted(OPEN_METHODS)
    ]


def test_both_protocols_count_and_refuse_by_the_same_rules() -> None:
    rules = [
        re.findall(r"\(begin.*?\(end\)", (FOLDER / f"{name}_backend.cfg").read_text(), re.DOTALL)
        for name in ("http", "grpc")
    ]
    http, grpc = ([r for r in text.splitlines()[1:] if "#" not in r] for (text,) in rules)
    assert len(http) > 10
    assert http == grpc


@pytest.mark.parametrize("name", ["tandem", "My_app#2/x y"])
def test_an_application_is_found_by_the_name_that_serve_makes_of_it(name: str) -> None:
    assert backend_name("http", name) == HAProxyManager.get_safe_name(f"http-{name}")


def test_a_file_is_edited_again_from_what_serve_wrote(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    edit_file(str(config), OF_OWN, BACKEND)
    once = config.read_text()
    edit_file(str(config), OF_OWN, BACKEND)
    assert config.read_text() == once
    edit_file(str(config), edits_of(RuleOptions(headers_within_s=2), OWN), BACKEND)
    assert config.read_text().count("timeout http-request 2s") == 2  # of HTTP and gRPC
    assert config.with_name("haproxy.cfg.serve").read_text() == CONFIG
    assert sorted(path.name for path in tmp_path.iterdir()) == ["haproxy.cfg", "haproxy.cfg.serve"]


def test_haproxy_is_not_started_from_a_folder_of_a_neighbours(shared_place, neighbour, tmp_path):
    """A cluster's Serve writes its file below /tmp, where another user may have made the folder."""
    neighbour("mkdir -m 777 haproxy-serve")
    config = shared_place / "haproxy-serve" / "haproxy.cfg"
    config.write_text(CONFIG)
    job = {"edits": [], "remedy": "", "backend": BACKEND, "refusal": str(tmp_path / "refused")}
    (file := tmp_path / "job").write_text(json.dumps(job | {"binary": "/bin/false"}))
    words = [sys.executable, "-I", "-S", haproxy_rules.__file__, str(file), "-f", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    says = f"a folder of its own: {config.parent} is another user's (uid 65534); have it removed"
    assert (done.returncode, says in done.stderr) == (78, True), done.stderr
    assert config.read_text() == CONFIG


@pytest.mark.parametrize("replicas", [{}, {"http": 30000, "grpc": 40000}], ids=["none", "both"])
@pytest.mark.parametrize("grpc_port", [None, 9000])
@pytest.mark.parametrize("origins", [(), ("*",), ("https://a.example", "https://b.example")])
@pytest.mark.parametrize("place", ["own", "tls", "client certificates", "cluster"])
def test_haproxy_itself_takes_every_combination(
    tmp_path, root, signed, place, origins, grpc_port, replicas
):
    tls = Tls(signed.certificate, signed.key, root.path if place == "client certificates" else None)
    words = "" if place == "own" else tls.link(tmp_path)
    sockets = (tmp_path / "http.sock", tmp_path / "grpc.sock")
    own = None if place == "cluster" else OwnService("0.0.0.0", sockets, words)
    options = RuleOptions(max_requests=7 if own else None, origins=origins)
    file = tmp_path / "haproxy.cfg"
    write_serves_config(file, ports=PORTS, grpc_port=grpc_port, replicas=replicas)
    edit_file(str(file), edits_of(options, own), BACKEND)
    command = [str(haproxy_binary()), "-c", "-f", str(file)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "NOOP" not in checked.stderr  # a rule that never applies
    text = file.read_text()
    lines = re.findall(r"^ *bind (\S+)(.*)$", text, re.MULTILINE)
    bound = {address: rest for address, rest in lines if address.startswith("0.0.0.0:")}
    assert len(bound) == (own is not None) * (1 + (grpc_port is not None))
    own_sockets = {(f"unix@{tmp_path}/{n}-page.sock", " mode 600") for n in ("metrics", "stats")}
    assert not own or own_sockets <= set(lines)
    others = {a for a, _ in lines if not a.startswith(("127.0.0.1:", "unix@", "0.0.0.0:"))}
    assert not others
    assert " mode 600 level admin " in text
    assert all(("ssl crt" in rest) == (place != "own") for rest in bound.values())
    assert all(("verify" in rest) == (place == "client certificates") for rest in bound.values())


def test_every_gateway_has_an_entry_that_keeps_no_connection() -> None:
    """One of two takes half of the requests, the next all that are left; Serve's proxy has none."""
    servers = "    server a 127.0.0.1:1 check observe layer4\n    server b 127.0.0.1:2 check\n"
    backup = "    server serve 127.0.0.1:3 check backup\n"
    text = f"backend {BACKEND}\n{servers}{backup}backend http-other\n{servers}"
    new = "".join(
        f"    server {name}-unkept {at} no-check track {BACKEND}/{name} weight 0 pool-max-conn 0\n"
        f"    use-server {name}-unkept if {{ var(txn.once) -m bool }} {{ rand({left}) eq 0 }}\n"
        for name, at, left in (("a", "127.0.0.1:1", 2), ("b", "127.0.0.1:2", 1))
    )
    assert with_unkept(text, BACKEND) == text.replace("backend http-o", f"{new}backend http-o")
    assert with_unkept(text, "http-a") == text


def test_an_edit_with_any_number_of_places() -> None:
    assert edited("a\nb\na\n", [Edit("", (), "^a$", "c", per=None)]) == "c\nb\nc\n"
    assert edited("b\n", [Edit("", (), "^a$", "c", per=None)]) == "b\n"
    with pytest.raises(MissingEditError, match="twice"):
        edited("a\nb\na\n", [Edit("twice", (), "^a$", "c")])
