"""Tasks whose answers lie far before their questions: to teach a model to read a long context, and to see whether it
does."""

from perilune.data.tasks.aggregation import Aggregation
from perilune.data.tasks.files import Files
from perilune.data.tasks.needle import Needle
from perilune.data.tasks.page import Question, Sample
from perilune.data.tasks.phrased import Chains, Retrieval
from perilune.data.tasks.scattered import Scattered
from perilune.data.tasks.stream import TaskStream
from perilune.data.tasks.task import Task
from perilune.data.tasks.variables import Variables

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Needle, Variables, Aggregation, Files, Scattered, Retrieval, Chains)
}
"""By the names that a stage's mix and a run's results have for them."""
JUDGED = ("needle", "variables", "aggregation", "files", "scattered")
"""What a run is judged by unless told otherwise."""

__all__ = [
    "JUDGED",
    "TASKS",
    "Aggregation",
    "Chains",
    "Files",
    "Needle",
    "Question",
    "Retrieval",
    "Sample",
    "Scattered",
    "Task",
    "TaskStream",
    "Variables",
]
