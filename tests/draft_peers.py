"""A client and a server written from draft-perlert-wg-00 alone: plain UDP sockets, nothing of this package."""

import socket


class PlainClient:
    """A peer as somebody would write it who has read the draft and nothing else."""

    def __init__(self, port, header, key, tag):
        self.lobby, self.header, self.key, self.tag = ("127.0.0.1", port), header, key, tag
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.settimeout(30.0)
        self.steps = []
        self.lobbies = []

    def say(self, text, address=None):
        self.socket.sendto(f"{self.header};{text}".encode(), address or self.lobby)

    def hear(self, *starts):
        while True:
            data, source = self.socket.recvfrom(2048)
            text = data.decode("utf-8")
            head, _, body = text.partition(";")
            if "=open," in body or "=close," in body:
                self.lobbies.append(body)
                if "lobby" in starts:
                    return head, body, source
            for start in starts:
                if body.startswith(start):
                    assert source[1] == self.lobby[1] or start == "obs="  # P-12
                    return head, body, source

    def play(self, policy):
        self.say("lobby")
        assert f"{self.key}=open" in self.hear("lobby")[1]
        self.say(f"register={self.key},{self.tag}")
        self.hear("registered=" + self.key)
        self.say(f"ready={self.key},true")
        _, body, _ = self.hear("start=port:")
        rollout = ("127.0.0.1", int(body.removeprefix("start=port:")))
        self.say(f"action={policy(None)}", rollout)
        while True:
            head, body, source = self.hear("obs=")
            assert source == rollout  # P-13
            fields = dict(field.partition("=")[::2] for field in body.split(";"))
            observation = [float(number) for number in fields["obs"].split(",")]
            self.steps.append((int(head.split(":")[3]), observation, float(fields["reward"]), fields["done"]))
            if fields["done"] == "true":
                return sum(reward for _, _, reward, _ in self.steps)
            self.say(f"action={policy(observation)}", rollout)

    def close(self):
        self.socket.close()


class PlainServer:
    """A server as plain as can be, for one client and five steps."""

    def __init__(self, header):
        self.header = header
        self.lobby, self.rollout = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        for sock in self.lobby, self.rollout:
            sock.bind(("127.0.0.1", 0))
            sock.settimeout(30.0)
        self.port = self.lobby.getsockname()[1]
        self.actions = []

    def serve(self):
        ready, tag = "not_ready", None
        while True:
            data, client = self.lobby.recvfrom(512)
            body = data.decode().partition(";")[2]
            if body.startswith("register="):
                tag, ready = body.partition(",")[2], "not_ready"
                self.say("registered=agent0", client)
            elif body.startswith("ready="):
                ready = "ready" if body.endswith("true") else "not_ready"
            status = f"close,citizen,{tag},{ready}" if tag else "open,citizen,cpu,ready"
            self.say(f"agent0={status}", client)
            if ready == "ready":
                break
        self.say(f"start=port:{self.rollout.getsockname()[1]}", client)
        for number in range(5):
            data, client = self.rollout.recvfrom(512)
            self.actions.append(data.decode())
            done = "true" if number == 4 else "false"
            step = f"{self.header}:{1590853116323 + number}:0;obs={number},0.5;reward=1.5;done={done}"
            self.rollout.sendto(step.encode(), client)

    def say(self, text, client):
        self.lobby.sendto(f"{self.header};{text}".encode(), client)

    def close(self):
        self.lobby.close()
        self.rollout.close()
