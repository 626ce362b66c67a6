"""Tasks whose answers lie far before their questions: to teach a model to read a long context, and to see whether it
does."""

from perilune.data.tasks.needle import Needle
from perilune.data.tasks.page import Question, Sample
from perilune.data.tasks.stream import TaskStream
from perilune.data.tasks.task import Task

TASKS: dict[str, type[Task]] = {task.name: task for task in (Needle,)}

__all__ = ["TASKS", "Needle", "Question", "Sample", "Task", "TaskStream"]
