"""What the figures of a result mean, in one sentence each. Tables in the terminal (--explain) and pages take
their explanations from here."""

from __future__ import annotations

import re

GLOSSARY = {
    "round": "round of training, from 1",
    "cohort": "clients that were drawn for the round",
    "accuracy": "mean over clients of the accuracy of the model that the method deploys, last round",
    "accuracy/pooled": "right answers over the test samples of all clients together",
    "accuracy/worst10": "mean over the tenth of the clients with the lowest accuracy",
    "accuracy/std": "standard deviation over clients",
    "accuracy/best": "accuracy of the best round; chosen by test data, so it is no fair estimate",
    "accuracy/last10": "mean accuracy of the last ten evaluated rounds",
    "accuracy/last10_std": "standard deviation over the last ten evaluated rounds",
    "accuracy/selected": "accuracy of the round that validation data would choose",
    "accuracy/better_of": "the largest of the accuracies of the global, customised and personal models",
    "accuracy/tacc": "TAcc of FedCAP: the larger of two averages, of the models that clients are sent and of"
    " their personal ones",
    "accuracy/tacc/pooled": "TAcc with averages over test samples instead of over clients",
    "accuracy/late": "mean over the clients that data.held_out keeps out of training",
    "loss": "mean loss over the test samples of benign clients, of the deployed model",
    "loss/train": "mean loss over the batches of the round's training",
    "macro_f1": "mean over clients of the mean F1 of a client's classes",
    "balanced_accuracy": "mean over clients of the mean recall of a client's classes",
    "auc": "area under the ROC curve, mean over the clients that have two classes or more",
    "attack/lost": "accuracy that the attack cost benign clients, compared with the same run without it",
    "attack/asr": "share of benign clients' triggered test samples that the deployed model takes for the"
    " attacker's target; samples of the target class are left out unless attack.inclusive",
    "attack/asr/strict": "attack/asr with samples of the target class left out, also where attack.inclusive",
    "attack/asr/mean": "attack/asr as the mean over benign clients of each one's own share",
    "attack/asr/last10": "mean of attack/asr over the last ten evaluated rounds",
    "attack/noted_rounds": "rounds in which the attack deviated from its formula",
    "detection/dacc": "share of clients rightly banned or rightly not. Where no client was banned it is the"
    " share of benign clients (0.7 with 3 attackers among 10); tables then say 'no detection', or 'no bans'"
    " where clients were only rejected for a round",
    "detection/fpr": "share of benign clients that were banned",
    "detection/fnr": "share of attackers that were not banned",
    "detection/rounds": "mean round in which the attackers that were caught were banned",
    "detection/auc/weights": "ROC-AUC of the rule's weights, where a low weight is suspicious",
    "matching/accuracy": "share of decisions on a peer that name the true partner",
    "privacy/epsilon": "largest epsilon that a client has spent under [privacy]; none without noise",
    "privacy/delta": "delta to which privacy/epsilon belongs",
    "privacy/withheld": "clients that have stopped answering because their budget is spent",
    "bytes/up": "bytes from clients to the server, in accepted replies",
    "bytes/down": "bytes from the server to clients",
    "seconds/client": "seconds of training; runs that are trained together share them",
    "seconds/server": "seconds of the server",
    "seconds/evaluate": "seconds of evaluation",
    "diverged": "first round in which nothing that benign clients sent was finite, or their loss was not",
    "fallback_rounds": "rounds in which a rule used its fallback",
    "refused": "replies that screening refused",
    "rejected": "updates that a detector rejected for their round",
}
_PATTERNS = {
    r"validation/(?P<of>.+)": "{of}, on validation data instead of test data",
    r"(?P<of>attack/asr(?:/strict)?|[a-z_1]+(?:/late)?)/(?P<model>global|customised|personal)": "{of}, here"
    " of the {model} model",
    r"(?P<of>.+)/worst10": "{of}, over the worst tenth of the clients",
    r"(?P<of>.+)/std": "standard deviation over clients of: {of}",
    r"(?P<of>.+)/clients": "number of clients that have a value of: {of}",
    r"rounds_to/(?P<target>.+)": "first round whose accuracy reaches {target}",
    r"detection/auc/(?P<score>.+)": "ROC-AUC of a detector's score {score}; a high score is suspicious",
    r"seconds/(?P<part>.+)": "seconds of {part}",
}


def explain(name: str) -> str | None:
    """What a figure means; None for a name that is not known.

    >>> explain("accuracy/worst10")
    'mean over the tenth of the clients with the lowest accuracy'
    >>> explain("rounds_to/0.80")
    'first round whose accuracy reaches 0.80'
    """
    if name in GLOSSARY:
        return GLOSSARY[name]
    for pattern, text in _PATTERNS.items():
        if found := re.fullmatch(pattern, name):
            words = found.groupdict()
            if "of" in words:
                words["of"] = explain(words["of"]) or words["of"]
            return text.format(**words)
    return None
