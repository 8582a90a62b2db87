"""An engine that samples with the adapter of the step before: a fault that the canary must find."""


def delay_sync(monkeypatch, kind):
    """Let ``kind.sync`` send the adapter that it was given the time before."""
    sync = kind.sync
    last = {}

    def late(self, model):
        adapter = {n: p for n, p in model.named_parameters() if p.requires_grad}
        now = {name: parameter.data for name, parameter in adapter.items()}
        copies = {name: values.clone() for name, values in now.items()}
        for name, parameter in adapter.items():
            parameter.data = last.get(name, now[name])
        sync(self, model)
        for name, parameter in adapter.items():
            parameter.data = now[name]
        last.update(copies)

    monkeypatch.setattr(kind, "sync", late)
