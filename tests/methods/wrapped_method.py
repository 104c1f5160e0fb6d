"""A method that does what another one does, except for what a subclass overrides."""

from tests.methods.tiny_runs import make_context

from pliant.methods.state import init_device_state, init_server_state


class WrappedMethod:
    def __init__(self, inner):
        self.inner, self.local = inner, inner.local

    def make_budget_policy(self, net):
        return make_context(net, self.inner).budget_policy

    def select_subnet(self, net, row, key, step):
        return make_context(net, self.inner).select_subnet(row, key, step)

    def macs(self, net, row, key, step):
        return make_context(net, self.inner).step_macs(row, key, step)

    def subnet_to_send(self, net, row, key):
        return make_context(net, self.inner).subnet_to_send(row, key)

    def train(self, net, task, steps):
        return make_context(net, self.inner).train(task, steps)

    def init_state(self, params):
        return init_server_state(self.inner, params)

    def init_device_state(self, params):
        return init_device_state(self.inner, params)

    def broadcast(self, state):
        return make_context(None, self.inner).broadcast(state)

    def merge(self, net, state, updates):
        return make_context(net, self.inner).merge(state, updates)
