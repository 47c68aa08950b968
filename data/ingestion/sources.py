"""Rows from each kind of source as one stream."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.ingestion.formats import Demonstration, choose_layout
from data.ingestion.opening import open_input
from data.ingestion.readers import batch_rows, read_rows
from data.ingestion.rows import Row
from data.settings import DatasetsSource, FileSource, Segmentation, Source, SuiteSource

_LOOK_AHEAD = 100
"""Rows whose columns decide the format."""
_BATCH = 1024


@dataclass
class Stream:
    """Rows of a source, how one is read, and how far reading is."""

    name: str
    format: str
    rows: Iterator[Row]
    parse: Callable[[dict[str, Any]], Demonstration]
    unit: Callable[[Demonstration], Segmentation]
    progress: Callable[[], tuple[float, float]]


def demonstration_stream(source: Source, segmentation: Segmentation | None, held_out: int) -> Stream:
    """The rows of `source`; a suite draws `held_out` more than its training demonstrations.

    Raises UserError where the source cannot be read, at once or while its rows are taken.
    """
    if isinstance(source, SuiteSource):
        return _suite(source, segmentation, held_out)
    if isinstance(source, FileSource):
        return _file(source, segmentation)
    return _datasets(source, segmentation)


def _by_layout(
    source: FileSource | DatasetsSource,
    name: str,
    rows: Iterator[Row],
    segmentation: Segmentation | None,
    progress: Callable[[], tuple[float, float]],
) -> Stream:
    first = list(islice(rows, _LOOK_AHEAD))
    if not first:
        raise UserError(f"{name} holds no rows; give a file with demonstrations")
    columns = {column for row in first if row.values is not None for column in row.values}
    layout = choose_layout(source, columns, name)

    def unit(found: Demonstration) -> Segmentation:
        return segmentation or ("code_lines" if found.answer_kind == "program" else layout.segmentation)

    kind = source.answer_kind

    def parse(values: dict[str, Any]) -> Demonstration:
        found = layout.read(values)
        return found if kind is None else found._replace(answer_kind=kind)

    return Stream(name, layout.name, chain(first, rows), parse, unit, progress)


def _file(source: FileSource, segmentation: Segmentation | None) -> Stream:
    stack = contextlib.ExitStack()
    opened = stack.enter_context(open_input(source.path))

    def rows() -> Iterator[Row]:
        with stack:
            yield from read_rows(opened)

    try:
        return _by_layout(
            source, source.path, rows(), segmentation, lambda: (min(opened.position(), opened.size), opened.size)
        )
    except BaseException:
        stack.close()
        raise


def _suite(source: SuiteSource, segmentation: Segmentation | None, held_out: int) -> Stream:
    from data.suites import SUITES

    if source.suite not in SUITES:
        raise UserError(f"source.suite is {source.suite!r}; the suites are {', '.join(sorted(SUITES))}")
    suite = SUITES[source.suite]
    total = source.demonstrations + held_out
    drawn = 0

    def rows() -> Iterator[Row]:
        nonlocal drawn
        for drawn, example in enumerate(suite.examples(total, source.seed, source.difficulty), start=1):
            yield Row(
                drawn,
                {
                    "question": example.question,
                    "rationale": example.rationale,
                    "answer": example.answer,
                    "answer_kind": example.answer_kind,
                    "response": example.response,
                },
            )

    def parse(values: dict[str, Any]) -> Demonstration:
        return Demonstration(**values)

    return Stream(
        source.suite, "suite", rows(), parse, lambda found: segmentation or suite.segmentation, lambda: (drawn, total)
    )


def _datasets(source: DatasetsSource, segmentation: Segmentation | None) -> Stream:
    table = _load(source)
    done = 0

    def rows() -> Iterator[Row]:
        nonlocal done
        for batch in table.with_format("arrow").iter(_BATCH):
            for values in batch_rows(batch):
                done += 1
                yield Row(done, values)

    name = ":".join(part for part in (source.name, source.config, source.split) if part)
    return _by_layout(source, name, rows(), segmentation, lambda: (done, table.num_rows))


def _load(source: DatasetsSource):
    import datasets  # takes a second to import, and only this source needs it

    datasets.disable_progress_bars()
    try:
        if (Path(source.name) / "state.json").is_file():  # written by save_to_disk, one split
            return datasets.load_from_disk(source.name)
        return datasets.load_dataset(source.name, source.config, split=source.split)
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        first = str(error).strip().split("\n")[0][:300]
        raise UserError(
            f"the data set {source.name!r} (config {source.config}, split {source.split!r}) cannot be loaded: {first}; "
            "check source.name, source.config and source.split, or give a file"
        ) from None
