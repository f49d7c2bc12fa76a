"""Local training in one process and in float64: the truth the runtime is held against.

Replicas are copies of one model. What each does after a step is read off the policy; the formulas are those of the notes, written
for whole vectors: no slices, no hops, no threads.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from paceline.policies.sync import Moment, Round


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def put(model, values):
    offset = 0
    for p in model.parameters():
        if p.requires_grad:
            p.data.copy_(values[offset : offset + p.numel()].view_as(p))
            offset += p.numel()


def train(policy, nodes, make_model, make_optimizer, data, batches, epoch_steps):
    """Parameters of every replica after the last step.

    Args:
        policy: the sync policy.
        nodes: lists of workers.
        make_model: -> model.
        make_optimizer: model -> optimizer.
        data: tensors (x, y).
        batches: for every step, every worker's indices.
        epoch_steps: steps in an epoch.
    """
    terms = policy.terms
    replicas = nodes if terms.level == "node" else [[rank] for part in nodes for rank in part]
    first = make_model().double()
    models = [copy.deepcopy(first) for _ in replicas]
    optimizers = [make_optimizer(model) for model in models]
    x, y = data[0].double(), data[1]
    scope, state = policy.init()
    anchor = flat(first)
    momentum = torch.zeros_like(anchor)
    samples = [0] * len(replicas)
    sent = pending = None
    for step, shares in enumerate(batches, 1):
        for number, (members, model, optimizer) in enumerate(zip(replicas, models, optimizers, strict=True)):
            joined = [i for rank in members for i in shares[rank]]
            samples[number] += len(joined)
            used = [i for share in shares for i in share] if scope == "all" else joined
            optimizer.zero_grad()
            F.cross_entropy(model(x[used]), y[used]).backward()
            optimizer.step()
        if len(replicas) == 1:
            continue  # nobody to agree with
        epoch, within = divmod(step - 1, epoch_steps)
        told = Round(0.0, 0.0, 0.0) if pending is not None or sent is not None else None
        seen = Moment(step=step, epoch=epoch, ends_epoch=within == epoch_steps - 1, lr=0.1, round=told)
        action, state = policy.update(seen, state)
        early = terms.merge == "daso" and action.merge and action.send and not action.wait
        snapshot = [flat(model) for model in models]
        if action.merge and pending is not None:
            anchor, momentum = take_in(terms, anchor, momentum, pending, models)
            pending = None
        if action.send:
            span = slice(0, len(anchor))
            if action.fragment >= 0:
                parts = terms.fragments
                span = slice(len(anchor) * action.fragment // parts, len(anchor) * (action.fragment + 1) // parts)
            weights = [count / sum(samples) for count in samples]
            samples = [0] * len(replicas)
            sent = snapshot if early else [flat(model) for model in models]
            pending = (span, sent, weights, 0 if action.wait else state.delay)
            if action.wait:
                anchor, momentum = take_in(terms, anchor, momentum, pending, models)
                pending = None
        if action.scope == "all" and scope != "all":
            average_state(models, optimizers, replicas)
        if action.scope != "all" and scope == "all":
            anchor = flat(models[0])
            samples = [0] * len(replicas)
        scope = action.scope
    return [flat(model) for model in models]


def take_in(terms, anchor, momentum, pending, models):
    span, sent, weights, delay = pending
    mean = sum(w * (anchor - y)[span] for w, y in zip(weights, sent, strict=True))
    anchor, momentum = anchor.clone(), momentum.clone()
    momentum[span] = terms.outer_momentum * momentum[span] + mean
    step = mean + terms.outer_momentum * momentum[span] if terms.outer_momentum else mean
    anchor[span] -= terms.outer_lr * step
    for model, y in zip(models, sent, strict=True):
        now = flat(model)
        if delay == 0:
            now[span] = anchor[span]
        elif terms.merge == "daso":
            replicas = len(models)
            now[span] = (2 * delay * now[span] + replicas * anchor[span]) / (2 * delay + replicas)
        else:
            now[span] += anchor[span] - y[span]
        put(model, now)
    return anchor, momentum


def average_state(models, optimizers, replicas):
    """Every worker counts once."""
    workers = sum(len(members) for members in replicas)
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        states = [o.state.get(p, {}) for o, p in zip(optimizers, parameters, strict=True)]
        for key in states[0]:
            if isinstance(states[0][key], torch.Tensor):
                mean = sum(state[key] * len(members) for state, members in zip(states, replicas, strict=True)) / workers
                for state in states:
                    state[key].copy_(mean)
