"""The user's function on DataFrames: in a pipeline file, or given as a function.

It is one of
* `transform(frame) -> DataFrame`: `frame` has the records of all topics given on the command line;
* `pipeline(spark, read) -> DataFrame`: for joins and several inputs; `read("flights")` returns the records of a topic
  as a stream, with options of the source as keywords.

Invariants:
* A file is executed on the driver; its functions are pickled by value, so workers do not need the file.
* A function with two parameters is `pipeline`, any other one is `transform`.
* An error in the file is reported with file name and line number.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from typing import TYPE_CHECKING

from mansio.errors import MansioError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from pyspark.sql import DataFrame, SparkSession

    PipelineSource = str | Callable[..., DataFrame]
    """A pipeline file, or the function itself."""
    ReadTopic = Callable[..., DataFrame]
    BuildDataFrame = Callable[[SparkSession, ReadTopic], DataFrame]

MODULE_NAME = "mansio_user_pipeline"


class PipelineFileError(MansioError):
    """The user's pipeline file is missing, invalid, or failed."""


def load_pipeline_file(path: str) -> ModuleType:
    """Execute the pipeline file and return it as a module. Raises `PipelineFileError` if it is missing, fails, or does
    not define exactly one of `transform` and `pipeline`.
    """
    if not os.path.isfile(path):
        raise PipelineFileError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise PipelineFileError(f"{path} is no Python file: its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PipelineFileError(error_location(error, path)) from error
    if callable(getattr(module, "transform", None)) == callable(getattr(module, "pipeline", None)):
        raise PipelineFileError(
            f"{path} has to define either transform(frame) or pipeline(spark, read), and return a DataFrame"
        )
    return module


def source_name(source: PipelineSource) -> str:
    """Return the name of the user's function for messages: the path of its file, or its own name."""
    return source if isinstance(source, str) else getattr(source, "__qualname__", repr(source))


def dataframe_builder(
    source: PipelineSource, topics: tuple[str, ...], *, is_streaming: bool = True
) -> BuildDataFrame:
    """Return the function that builds the DataFrame of a pipeline. `topics`: the input of `transform`. `is_streaming`:
    whether the DataFrames are streams, otherwise they are batches. Raises `PipelineFileError`.
    """
    if isinstance(source, str):
        module = load_pipeline_file(source)
        _pickle_by_value(module)
        path, is_transform = source, callable(getattr(module, "transform", None))
        function = module.transform if is_transform else module.pipeline
    else:
        path, function = inspect.getsourcefile(source) or source_name(source), source
        is_transform = len(inspect.signature(source).parameters) != len(("spark", "read"))
    name = source_name(source)
    if not is_transform:
        return lambda spark, read: _call_user_function(
            name, path, function, (spark, read), is_streaming=is_streaming
        )
    if not topics:
        raise PipelineFileError(f"{name} defines transform(frame), so the topics have to be given")
    return lambda _spark, read: _call_user_function(
        name, path, function, (read(",".join(topics)),), is_streaming=is_streaming
    )


def _pickle_by_value(module: ModuleType) -> None:
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # PySpark types no cloudpickle


def _call_user_function(
    name: str,
    path: str,
    function: Callable[..., object],
    arguments: tuple[object, ...],
    *,
    is_streaming: bool,
) -> DataFrame:
    """`name`: of the function for messages; `path`: of the file in which it is."""
    from pyspark.sql import DataFrame

    try:
        inspect.signature(function).bind(*arguments)
        frame = function(*arguments)
    except MansioError:
        raise
    except Exception as error:
        raise PipelineFileError(error_location(error, path)) from error
    if not isinstance(frame, DataFrame):
        raise PipelineFileError(
            f"{name}: {function.__name__} returned {type(frame).__name__}, not a DataFrame"
        )
    if is_streaming and not frame.isStreaming:
        raise PipelineFileError(
            f"{name}: {function.__name__} returned a DataFrame that is no stream: use what it got"
        )
    return frame


def error_location(error: Exception, path: str) -> str:
    """One line with the file, the line number in it, and the error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        lines = [error.lineno]
    location = f"{path}, line {lines[-1]}" if lines else path
    message = str(error).strip().split("\n")[0]
    return (
        f"{location}: {type(error).__name__}: {message}" if message else f"{location}: {type(error).__name__}"
    )
