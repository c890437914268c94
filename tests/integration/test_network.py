"""Nodes on a network of their own: what links do, that none is left behind, and the load balancer.

The balancer of configs/haproxy is the real one: a node that is cut off is left within seconds.
"""

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.services.live_service import ROOT
from tests.support.services.network import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((reason := why_not()) is not None, reason=str(reason)),
]
START = """
import asyncio, json, socket, subprocess, sys, tempfile, time
from pathlib import Path
from tests.support.services import network
network.enter()
net = network.Network(delay_ms=1)
node = net.add()
print(node.wire.pid, flush=True)

def run(place, text):
    command = [*place.prefix, sys.executable, "-c", text]
    return subprocess.Popen(command, stdout=subprocess.PIPE)
"""
WAIT = "time.sleep(60)"
# An echo on a node, and how many datagrams of ``size`` come back by when, for each kind of link.
LINKS = r"""
server = run(node, '''
import socket
s = socket.socket(type=socket.SOCK_DGRAM)
s.bind(("", 7))
print(flush=True)
while True:
    s.sendto(*s.recvfrom(2000))
''')
server.stdout.readline()
client = socket.socket(type=socket.SOCK_DGRAM)
client.settimeout(1)

def measured(number, size=100):
    came, began, last = 0, time.monotonic(), 0.0
    for index in range(number):
        client.sendto(bytes(size), (node.address, 7))
    try:
        while came < number:
            client.recv(2000)
            came, last = came + 1, time.monotonic() - began
    except TimeoutError:
        pass
    return came, last

measured(1)  # who has this address?
told = {"near": measured(1)}
node.shape(delay_ms=50)
told["far"] = measured(1)
node.shape(loss=0.3)
told["lossy"] = measured(400)
node.shape(mbit_s=1)
told["narrow"] = measured(40, 1000)
node.shape(delay_ms=1)
node.set_link(is_up=False)
told["cut"] = measured(5)
node.set_link(is_up=True)
told["mended"] = measured(5)
server.kill()
net.stop()
print(json.dumps(told))
"""
# Three nodes that answer a photo after 0.2 s. The first can be slow: two of five checks are late,
# and photos get 504 after a second.
NODES = r"""
sys.path.append("tests/load")
import aiohttp
from balancer import Balancer
nodes = [node, net.add(), net.add()]
NODE = r'''
import asyncio
from itertools import count
IS_SLOW, checks = {}, count()
async def serve(reader, writer):
    while head := await reader.readuntil(b"\r\n\r\n"):
        is_photo = head.startswith(b"POST")
        if is_photo:
            await reader.readexactly(60000)
        late_s = is_photo or next(checks) % 5 < 2
        await asyncio.sleep(late_s if IS_SLOW else 0.2 * is_photo)
        status = b"504 Late" if IS_SLOW and is_photo else b"200 OK"
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 1\r\n\r\nx")
async def main():
    async with await asyncio.start_server(serve, "0.0.0.0", 8000):
        await asyncio.sleep(60)
asyncio.run(main())
'''

async def ask(session, since):
    began = time.monotonic()
    async with session.post(balancer.url + "/v1/classify", data=bytes(60000)) as answer:
        return answer.status, time.monotonic() - began, since

async def load(each_time):
    tasks, begin = [], time.monotonic()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        while (since := time.monotonic() - begin) < 10:
            tasks += [asyncio.create_task(ask(session, since)) for _ in range(6)]
            await asyncio.sleep(0.1)
            each_time(since)
            await asyncio.sleep(0.15)
        return await asyncio.gather(*tasks)

def told(is_slow=False, each_time=lambda since: None):
    global balancer
    slow = [is_slow and each is node for each in nodes]
    servers = [run(each, NODE.replace("{}", str(one))) for each, one in zip(nodes, slow)]
    names = {f"node{index}": f"{each.address}:8000" for index, each in enumerate(nodes)}
    balancer = Balancer(net.add(), Path(tempfile.mkdtemp()), names)
    time.sleep(3)
    begin = time.monotonic()
    answers = asyncio.run(load(each_time))
    late = balancer.num_sent("node0", begin + 3)
    balancer.stop()
    for server in servers:
        server.kill()
    net.stop()
    print(json.dumps([late, answers]))
"""
# The first is cut off from second 2 to 7 of a load.
CUT = (
    NODES
    + """
was_cut = False
def cut(since):
    global was_cut
    if was_cut != (is_cut := 2 <= since < 7):
        node.set_link(is_up=not is_cut)
    was_cut = is_cut
told(each_time=cut)
"""
)
SLOW = NODES + "told(is_slow=True)"


def start(script: str) -> subprocess.Popen:
    command = [sys.executable, "-c", START + script]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def told_by(script: str):
    with start(script) as process:
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(said.splitlines()[-1])


@pytest.fixture(scope="module")
def told() -> dict:
    return told_by(LINKS)


def test_a_link_delays_each_way(told):
    assert told["near"][0] == told["far"][0] == 1
    assert told["near"][1] >= 0.002
    assert told["far"][1] >= 0.1


def test_a_link_loses_frames(told):
    assert 100 < told["lossy"][0] < 290  # of 400, 0.7 x 0.7 are expected


def test_a_link_is_narrow(told):
    assert told["narrow"][0] == 40
    assert told["narrow"][1] >= 0.3  # 40 KB at 1 Mbit/s


def test_a_link_that_was_cut_is_mended(told):
    assert told["cut"][0] == 0
    assert told["mended"][0] == 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_link_outlives_its_script(number):
    with start(WAIT) as script:
        wire = psutil.Process(int(script.stdout.readline()))
        script.send_signal(number)
    deadline = time.monotonic() + 20
    while wire.is_running() and wire.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_balancer_loses_nothing_on_a_node_that_is_cut_off():
    _, answers = told_by(CUT)  # status, seconds, sent at
    assert {status for status, *_ in answers} == {200}
    assert max(took for _, took, _ in answers) < 5.5  # TCP alone would send again after 6.4 s
    assert max(sent for _, took, sent in answers if took > 0.9) < 2 + 4.5


def test_the_balancer_leaves_a_node_that_is_in_time_now_and_then():
    num_sent_later, answers = told_by(SLOW)
    assert {status for status, *_ in answers} == {200}
    assert num_sent_later == 0
