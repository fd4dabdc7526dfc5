"""A pytest plugin for runs that stop at the first failure: Hypothesis makes none smaller."""

from hypothesis import Phase, settings

settings.register_profile("no-shrinking", phases=[Phase.explicit, Phase.reuse, Phase.generate])
settings.load_profile("no-shrinking")
