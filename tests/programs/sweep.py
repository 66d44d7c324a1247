"""Searches for hyperparameters as each library does it by default: without a seed. Tells what was tried."""

import json
import sys

import torch
from shared import BATCH, Points

TRIALS = 12
data, held_out = Points(64), Points(64, seed=2)
tried = []


def train(width, dropout, rate, prune=lambda epoch, loss: False):
    """The loss on data that is held out, which is the same on all ranks."""
    tried.append([width, dropout, rate])
    model = torch.nn.Sequential(
        torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(width, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for epoch in range(3):
        for points, classes in torch.utils.data.DataLoader(data, BATCH, shuffle=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(points), classes).backward()
            optimizer.step()
        loss = held_out.loss(model)
        if prune(epoch, loss):
            tried[-1].append(f"pruned after {epoch}")
            raise optuna.TrialPruned
    tried[-1].append(loss)
    return loss


def by_optuna(trial):
    def prune(epoch, loss):
        trial.report(loss, epoch)
        return trial.should_prune()

    width, dropout = trial.suggest_int("width", 4, 16), trial.suggest_float("dropout", 0.0, 0.6)
    return train(width, dropout, trial.suggest_float("rate", 0.01, 1.0, log=True), prune)


if sys.argv[1] == "optuna":
    import optuna

    by_name = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=3, reduction_factor=2)
    for pruner in (optuna.pruners.NopPruner(), optuna.pruners.MedianPruner(n_startup_trials=2), by_name):
        study = optuna.create_study(pruner=pruner)  # by TPE, with random ones first
        study.optimize(by_optuna, n_trials=TRIALS)
elif sys.argv[1] == "hyperopt":
    from hyperopt import fmin, hp, tpe

    space = [hp.randint("width", 4, 16), hp.uniform("dropout", 0.0, 0.6), hp.loguniform("rate", -4, 0)]
    fmin(lambda given: train(int(given[0]), *given[1:]), space, tpe.suggest, TRIALS + 12, show_progressbar=False)
elif sys.argv[1] == "hydra":
    import hydra

    @hydra.main(version_base=None, config_path=None)
    def by_hydra(config):
        return train(config.width, config.dropout, config.rate)

    space = ["+width=range(4,16)", "+dropout=interval(0.0,0.6)", "+rate=tag(log,interval(0.01,1.0))"]
    sys.argv[1:] = ["-m", "hydra/sweeper=optuna", f"hydra.sweeper.n_trials={2 * TRIALS}", *space]
    by_hydra()
else:
    import skopt

    space = [(4, 16), (0.0, 0.6), (0.01, 1.0, "log-uniform")]
    for _ in range(2):
        skopt.gp_minimize(lambda given: train(int(given[0]), *given[1:]), space, n_calls=TRIALS)
print(json.dumps(tried), flush=True)
