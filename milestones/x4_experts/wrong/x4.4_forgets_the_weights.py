"""Adds up the answers as they are: an expert that hardly suits the token counts as much as the best."""


def combine(answers, weights):
    return answers.float().sum(1).to(answers.dtype)
