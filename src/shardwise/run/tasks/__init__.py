"""Tasks of a run (text, chats, preferences), and the choice of one by the settings."""

from shardwise.run.settings import DpoSettings, FinetuneSettings, RunSettings, Settings
from shardwise.run.tasks.task import Method, Task


def task_of(settings: RunSettings) -> Task:
    """Return the task for the settings, without importing other tasks. Raises as its source and its method."""
    if not isinstance(settings, FinetuneSettings):
        from shardwise.run.tasks.texts import NewModel, NewTexts

        assert isinstance(settings, Settings)
        return Task(settings, NewModel(settings), NewTexts(settings))
    from shardwise.run.tasks.pretrained_model import PretrainedModel
    from shardwise.run.tasks.results import write_adapters, write_model

    source = PretrainedModel(settings)
    method: Method
    if isinstance(settings, DpoSettings):
        from shardwise.run.tasks.preference import Preferences

        method = Preferences(source)
    else:
        from shardwise.run.tasks.samples import Examples

        method = Examples(source)
    keeps_adapters = settings.lora.is_on and not settings.lora.lora_merge
    return Task(source.settings, source, method, write_adapters if keeps_adapters else write_model)
