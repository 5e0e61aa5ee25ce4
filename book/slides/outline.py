"""What each slide of a chapter shows, and what its speaker says: rules, applied to a notebook.

`deck_of` takes an executed notebook apart; `build_slides.py` lays the result out. No slide has a
text of its own:

- The first cell gives the title slide: its bold sentence and the list of what one will be able to
  do. Each `## ` heading begins a column of slides.
- A cell's metadata `slide_title` is the title of the slides made from it: a sentence, the message.
  It ends at a `## ` heading further down in the cell.
  The slide of a code cell without one takes that of the text it's shown with. The section's heading
  then stands in a corner; without a message, the heading is the title.
- A code cell with an equation or a sentence right before it is a slide: the sentence, the equation,
  the lines that compute, what the cell printed. More than 12 lines of code (of 71 columns) or of
  output stay in the notebook: nobody reads them from the back row. Cells tagged `setup`, `guard`,
  `versions`, `check` or `aside` are left out, and those that show a page of HTML.
- A cell's metadata `slide_figure` names a figure of the chapter, such as `03_steps`, which the
  slides made from it show as well: beside words and equations, below code and output. `03_steps:2`
  shows it up to its second stage.
- Equations beyond the one before a cell (two with one title share a slide), tables and lists are
  slides too, below the sentences that lead to them. A quotation is a slide with the sentences that
  follow it: they say what holds.
- A cell tagged `figure` is a slide if it draws, and then shows the picture alone. Tagged `slide` as
  well, it draws what was just said or printed, and takes no minutes. Tagged `aside` as well, only
  the page has it.
- Words and equations without code or output have the figure beside them that stands under the same
  heading, so that you see formula and picture together: the one shown last, or the first if it
  answers no question. Where it's as large below them, it is there.
- A section that begins with words alone has no slide for them: its first slide has them as notes.
- The exercises are one slide: the name of each, and the sentence that its text opens with, which
  asks for something in at most 12 words.
- A sentence that speaks of folded cells is for the notes: a slide has none.
- What the text says of a result right after it stands below the result, where there is room.
- All prose becomes the speaker's notes of the slide that follows it, or of the last of its section.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from html import escape
from math import inf

from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbformat import NotebookNode

from book.guide.teaching_minutes import sections, total
from book.notebooks.build_notebooks import SHOWS, TITLE
from book.project import BuildError, alt_text

LEFT_OUT = {"setup", "versions", "check", "guard", "aside"}
CODE = 12, 71  # lines and columns of code on a slide
PRINTED = 12, 100  # likewise of what a cell prints
LEAD = 320  # characters of a section's first sentences on its heading's slide
POINT = 280  # characters of the sentences around the one that leads to a slide, where there is room
REMARK = 220  # characters of what is said of a result
GOES_ON = re.compile(r"\*\*|(Now|Let|Here|Next|First|Then|On paper|Before)\b")  # to what comes next
FOLDS = re.compile(r"\bfold(s|ed)?\b", re.IGNORECASE)  # of which no slide speaks
BESIDE = {"text", "math", "list", "quote"}  # what a figure may stand by
MESSAGE = 75  # characters of a slide's title
TELLS = {"print", "check", "check_gradients", "must_differ"}
HOMEWORK = "Exercises"  # the heading under which no cell is shown
ASKED = 12  # words of the sentence that an exercise opens with; a formula is a word
SHORT = 40  # characters of a sentence that says little by itself
ASIDE = re.compile(r"\((?:[^()]|\([^()]*\))*[.!?]\)\s*")  # sentences in brackets
FORMULA = re.compile(r"\$[^$]*\$|`[^`]*`")  # or a name in code
STAGE = re.compile(r'<g id="(stage-(\d+)-\d+)">')
GROWS = re.compile(r'<g id="(stage-(\d+)-\d+)" class="fragment"[^>]*>')
NAMED = re.compile(r'"(\d\d[a-z]?_\w+)"')  # a figure, in the cell that shows it
# In which no sentence ends: a formula, code, a parenthesis, bold words but for their full stop.
UNBROKEN = re.compile(r"\$[^$]*\$|`[^`]*`|\([^()]*\)|\*\*[^*]+(?=[^*]\*\*)")
SENTENCE = re.compile(
    r"(?<=[.!?])(?<!\be\.g\.)(?<!\bal\.)(?<!\beq\.)(?<!\bApp\.)(?<!\bFig\.)"
    r"(\*\*|\*|[\"”])?\s+(?=[\"“*A-Z\ue000-\uf8ff])"
)


def maths(tex: str, options: dict) -> str:
    """A formula as MathJax finds it, inside an element that can be looked for."""
    if options["display_mode"]:
        return f'<div class="math">\\[{escape(tex.strip())}\\]</div>'
    return f'<span class="math">\\({escape(tex)}\\)</span>'


MARKDOWN = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin, renderer=maths)
for end in ("link_open", "link_close"):  # a slide has the words of a link
    MARKDOWN.add_render_rule(end, lambda *_: "")


@dataclass(frozen=True)
class Part:
    """One thing on a slide.

    Attributes:
        kind: text, math, list, table, quote, sample, code, output, svg, png, or remark: a text on
            what stands above it.
        source: as written: Markdown, TeX, Python, what was printed, the SVG, or the PNG in base64.
        alt: of a picture.
        longer: a text with the sentences around it, which takes its place where there is room.
    """

    kind: str
    source: str
    alt: str = ""
    longer: str = ""


@dataclass
class Slide:
    """What is shown, in this order, below the running head, and what is said."""

    kind: str  # title, section, statement, cell, figure or exercise
    head: str  # Markdown: the heading that it stands under
    parts: list[Part]
    notes: str = ""  # HTML
    message: str = ""  # Markdown: the slide's title, if its cell has one
    figure: int = 0  # the number of its figure among the chapter's; 0 for none
    beside: Part | None = None  # the figure in the right column, where it fits
    wanted: str = ""  # the name of the figure that its cell asks for
    opens: bool = False  # whether it is the first of its section


@dataclass
class Deck:
    """A chapter: its title, and columns of slides, each under the title of its section."""

    title: str
    minutes: dict[str, int] = field(default_factory=dict)  # to teach, of the whole and of sections
    columns: list[tuple[str, list[Slide]]] = field(default_factory=list)


def blocks(markdown: str) -> Iterator[Part]:
    """The top-level blocks of a cell; a heading's kind is h1, h2 or h3."""
    lines = markdown.splitlines()
    names = {"heading_open": "", "bullet_list_open": "list", "ordered_list_open": "list"}
    names |= {"table_open": "table", "blockquote_open": "quote", "paragraph_open": "text"}
    names |= {"code_block": "sample", "fence": "sample"}
    tokens = MARKDOWN.parse(markdown)
    for place, token in enumerate(tokens):
        if token.level or token.nesting < 0 or token.type == "html_block":  # a fold of a hint
            continue
        if token.type.startswith("math_block"):
            yield Part("math", token.content.strip())
        elif token.type == "heading_open":
            yield Part(token.tag, tokens[place + 1].content)
        else:
            yield Part(names[token.type], "\n".join(lines[slice(*token.map)]).strip("\n"))


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph of Markdown; a formula or a parenthesis is never cut."""
    kept = []

    def keep(match: re.Match) -> str:
        kept.append(match.group())
        return chr(0xE000 + len(kept) - 1)

    hidden = UNBROKEN.sub(keep, " ".join(paragraph.split()))
    found, start = [], 0
    for match in SENTENCE.finditer(hidden):
        end = match.end(1) if match.group(1) else match.start()
        found.append(hidden[start:end])
        start = match.end()
    found.append(hidden[start:])
    for place in reversed(range(len(kept))):  # what was hidden last may hold what was before
        found = [text.replace(chr(0xE000 + place), kept[place]) for text in found]
    return found


def leads_on(paragraph: str) -> bool:
    """Whether a paragraph ends within a sentence, which an equation or a cell then goes on with."""
    return paragraph.rstrip('*_"”')[-1] not in ".!?)"


def lead(paragraph: str) -> list[Part]:
    """What a slide shows of the paragraph before: the bold words it begins with, or its point.

    The point is the sentence that leads on, if there is one, else the first that is not an aside.
    Where that is a few words, the sentence beside it comes along.
    """
    while aside := ASIDE.match(paragraph):
        paragraph = paragraph[aside.end() :]
    if not paragraph:
        return []
    found = [sentence for sentence in sentences(paragraph) if not FOLDS.search(sentence)]
    if not found:
        return []
    few, leads = len(found[0]) < SHORT, leads_on(found[-1])
    if not leads:
        shown = found[: 1 + few]
    elif paragraph.startswith("**") and len(found) > 1:
        shown = [found[0], found[-1]]
    else:
        shown = found[-2:] if len(found[-1]) < SHORT else found[-1:]
    around = shown
    for n in range(len(shown), len(found) + 1):
        more = found[-n:] if leads else found[:n]
        if len(" ".join(more)) <= POINT:
            around = more
    return [Part("text", " ".join(shown), longer=" ".join(around))]


def remark(paragraph: str) -> tuple[str, str]:
    """What a paragraph says of the result before it; the rest leads to the next slide."""
    found = sentences(paragraph)
    n = 1 + (len(found) > 1 and len(found[0]) < SHORT)
    said = " ".join(found[:n])
    unfit = "?" in said or GOES_ON.match(said) or FOLDS.search(said)
    if leads_on(said) or unfit or len(said) > REMARK:
        return "", paragraph
    return said, " ".join(found[n:]) or paragraph


def opening(paragraph: str, limit: int = LEAD) -> str:
    """The first sentences, at least one; none that leads to an equation."""
    shown = []
    for sentence in sentences(paragraph):
        said = len(" ".join(shown))
        if leads_on(sentence) or (said > limit / 2 and said + len(sentence) > limit):
            break
        if FOLDS.search(sentence):
            break
        shown.append(sentence)
    while shown and re.fullmatch(r"\*\*[^*]+\*\*", shown[-1]):
        shown.pop()  # a title, of what does not stand here
    return " ".join(shown)


def in_one_line(task: str) -> str:
    """An exercise in short: its number, its grade, its name, and the sentence it opens with."""
    found = re.match(r"(\*\*[^*]+\*\* \*[^*]+\*) (.+)", " ".join(task.split()))
    if not found:
        raise BuildError(
            f"an exercise needs a name and a task, as in **1 · easy.** *A name.* Do it.: {task!r}"
        )
    name, asked = found[1], sentences(found[2])[0]
    words = len(FORMULA.sub("x", asked).split())
    if words > ASKED or leads_on(asked):
        raise BuildError(
            f"an exercise opens with a sentence of at most {ASKED} words, for its slide; "
            f"{asked!r} has {words}"
        )
    return f"{name} {asked}"


def printed(cell: NotebookNode) -> list[Part]:
    """What a cell printed, the value it shows or the error it raises, as one part."""
    texts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            texts.append(output.text)
        elif output.output_type == "error":
            texts.append(f"{output.ename}: {output.evalue}")
        elif output.output_type == "execute_result":
            texts.append(output.data["text/plain"] + "\n")
    joined = "".join(texts).rstrip("\n")
    return [Part("output", joined)] if joined and within(joined, PRINTED) else []


def is_page(cell: NotebookNode) -> bool:
    """Whether what a cell shows is for a notebook: a page of HTML."""
    return any("text/html" in output.get("data", {}) for output in cell.outputs)


def picture(cell: NotebookNode) -> Part | None:
    """The figure that a cell shows, in its stages where it has any."""
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/svg+xml" in data:
            svg = data["image/svg+xml"]
            grown = STAGE.sub(r'<g id="\1" class="fragment" data-fragment-index="\2">', svg)
            return Part("svg", grown, alt_text(output))
        if "image/png" in data:
            return Part("png", data["image/png"], alt_text(output))
    return None


def at_stage(drawing: Part, stage: float) -> Part:
    """A drawing that doesn't grow: it shows all of its stages up to this one."""

    def shown(group: re.Match) -> str:
        later = int(group[2]) > stage
        return f'<g id="{group[1]}" display="none">' if later else f'<g id="{group[1]}">'

    return replace(drawing, source=GROWS.sub(shown, drawing.source))


def code(source: str) -> list[Part]:
    source = re.sub(r" *# fmt: \w+$", "", source, flags=re.MULTILINE)
    source = re.sub(r"\n{3,}", "\n\n", without_checks(source))  # one empty line will do
    lines, columns = CODE
    if not within(source, CODE) and source.count("\n") < lines:
        source = narrowed(source, columns)
    return [Part("code", source)] if source and within(source, CODE) else []


def without_checks(source: str) -> str:
    """A cell without its statements that print, check or assert: what they say stands below it.

    Nothing is left of a cell that prints in a loop: half of it would compute nothing.
    """
    lines, kept, start = source.splitlines(), [], 0
    for statement in ast.parse(source).body:
        called = {getattr(n.func, "id", "") for n in ast.walk(statement) if isinstance(n, ast.Call)}
        tells = bool(TELLS & called) and not isinstance(statement, ast.FunctionDef)
        if tells and hasattr(statement, "body"):
            return ""
        if not tells and not isinstance(statement, (ast.Assert, ast.Import, ast.ImportFrom)):
            kept += lines[start : statement.end_lineno]
        start = statement.end_lineno
    return "\n".join(kept).strip("\n")


@cache
def narrowed(source: str, columns: int) -> str:
    """The same statements in shorter lines."""
    command = [sys.executable, "-m", "ruff", "format", "--line-length", str(columns), "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=True)
    return done.stdout


def within(text: str, limits: tuple[int, int]) -> bool:
    """Whether a text has at most so many lines and columns."""
    lines = text.splitlines()
    return len(lines) <= limits[0] and max(map(len, lines), default=0) <= limits[1]


def waits_for_words(slide: Slide) -> bool:
    """Whether what is said next is shown with it: below a title, below a quotation."""
    if slide.kind == "section":
        return not slide.parts and not slide.notes
    if slide.kind == "title":
        return len(slide.parts) == 1
    return slide.kind == "statement" and slide.parts[-1].kind == "quote"


def asks(slide: Slide) -> bool:
    """Whether a slide's words ask something, which its picture then answers."""
    return any(part.kind == "text" and "?" in part.source for part in slide.parts)


def show_beside(slides: list[Slide]) -> None:
    """Put a figure beside the words and equations under the same heading."""
    drawn = [slide for slide in slides if any(part.kind == "svg" for part in slide.parts)]
    latest = next((slide for slide in drawn[:1] if not asks(slide)), None)
    for slide in slides:
        if slide in drawn:
            latest = slide
            continue
        only_words = slide.kind in ("statement", "cell") and {p.kind for p in slide.parts} <= BESIDE
        if only_words and latest and latest.head == slide.head:
            figure = next(part for part in latest.parts if part.kind == "svg")
            slide.figure, slide.beside = latest.figure, at_stage(figure, inf)


class Chapter:
    """Goes through a notebook's cells in order, and gathers its slides."""

    def __init__(self, notebook: NotebookNode):
        self.deck, self.head = Deck(""), ""
        self.message = ""  # the title of the slides of the cell that is read
        self.wanted = ""  # the figure that they show
        self.pictures: dict[str, tuple[Part, int]] = {}  # each with its number
        self.notes: list[str] = []  # prose since the last slide
        self.paragraph = ""  # the last of it, which leads to what comes next
        self.equation: Slide | None = None  # waits for its cell
        self.result: Slide | None = None  # the slide before, if the text may still speak of it
        self.tasks: list[str] = []  # the exercises
        self.figures = 0  # so far
        for cell in notebook.cells:
            message, wanted = cell.metadata.get(TITLE, ""), cell.metadata.get(SHOWS, "")
            if cell.cell_type == "code":
                above, cell_tags = (self.message, self.wanted), set(cell.metadata.get("tags", []))
                self.message, self.wanted = message or above[0], wanted or above[1]
                self.read_code(cell, cell_tags)
                self.message, self.wanted = above if cell_tags & LEFT_OUT else ("", "")
            else:
                if message:
                    self.release()  # what stands above has a title of its own
                self.message, self.wanted = message, wanted
                for place, part in enumerate(blocks(cell.source)):
                    if place and part.kind in ("h1", "h2"):
                        self.message = self.wanted = ""  # they were for what stands above
                    self.read_block(part)
                    self.result = None
        self.close()
        for _, slides in self.deck.columns:
            for slide in slides:
                self.show_wanted(slide)
        parts = sections(notebook.cells)
        self.deck.minutes |= {self.deck.title: total(parts)[0]}
        self.deck.minutes |= {part.title: part.teach for part in parts if part.teach}

    def add(self, slide: Slide) -> None:
        self.deck.columns[-1][1].append(slide)
        self.notes, self.paragraph = [], ""
        shows = slide.kind in ("cell", "figure") or any(p.kind == "table" for p in slide.parts)
        self.result = slide if shows else None

    def make(self, kind: str, parts: list[Part]) -> Slide:
        """A slide of these parts below the sentence that leads to them, with the notes so far."""
        shown = lead(self.paragraph) + parts
        slide = Slide(kind, self.head, shown, "".join(self.notes), self.message)
        slide.wanted = "" if kind == "figure" else self.wanted
        self.notes, self.paragraph = [], ""
        return slide

    def show_wanted(self, slide: Slide) -> None:
        """Put the figure that a slide's cell asks for beside its words, or below what it printed.

        Raises:
            BuildError: the chapter shows no figure of this name.
        """
        if not slide.wanted:
            return
        name, _, stage = slide.wanted.partition(":")
        if name not in self.pictures:
            raise BuildError(f"under {slide.head!r}: the chapter shows no figure {name!r}")
        drawing, slide.figure = self.pictures[name]
        drawing = at_stage(drawing, int(stage) if stage else inf)
        if slide.kind != "section" and {part.kind for part in slide.parts} <= BESIDE:
            slide.beside = drawing
        else:
            ends = [i for i, part in enumerate(slide.parts) if part.kind == "remark"]
            slide.beside = None
            slide.parts.insert(ends[0] if ends else len(slide.parts), drawing)

    def release(self) -> None:
        """Add the equation that waits: to the one before it, or as a slide of its own."""
        if self.equation:
            held, self.equation = self.equation, None
            latest = self.deck.columns[-1][1][-1]
            alone = sum(part.kind == "math" for part in latest.parts) == 1
            if latest.kind == "statement" and alone and latest.message == held.message:
                latest.parts += held.parts
                latest.notes += held.notes
            else:
                self.deck.columns[-1][1].append(held)

    def close(self) -> None:
        """End a section: what is still to be said is said on its last slide."""
        self.release()
        if self.deck.columns:
            slides = self.deck.columns[-1][1]
            slides[-1].notes += "".join(self.notes)
            if len(slides) > 1 and slides[0].kind == "section":
                slides[1].message = slides[1].message or slides[0].message
                slides[1].notes = slides[0].notes + slides[1].notes
                del slides[0]  # its title stands above the next slide too
            elif slides[0].kind == "section" and slides[0].wanted:
                slides[0].kind = "statement"
            slides[0].opens = True
            show_beside(slides)
            if self.head == "Further reading":
                del self.deck.columns[-1]
        if self.tasks:
            tasks = Part("list", "\n".join(f"- {task}" for task in self.tasks))
            homework = self.deck.columns[-1][1][-1]
            homework.kind = "exercise"  # which leaves the list more room than a section's title
            homework.parts.append(tasks)
        self.notes, self.paragraph, self.tasks = [], "", []

    def read_block(self, part: Part) -> None:
        if part.kind in ("h1", "h2"):
            self.close()
            self.head = part.source
            self.deck.title = self.deck.title or part.source
            self.deck.columns.append((part.source, []))
            kind = "title" if part.kind == "h1" else "section"
            wanted = self.wanted if kind == "section" else ""
            self.add(Slide(kind, part.source, [], message=self.message, wanted=wanted))
        elif part.kind == "h3":
            self.release()
            self.head, self.paragraph = f"{self.deck.columns[-1][0]}: {part.source}", ""
        elif self.head.startswith(HOMEWORK):
            if re.match(r"\*\*\d · ", part.source):
                self.tasks.append(in_one_line(part.source))
        elif part.kind == "text":
            self.read_paragraph(part.source)
        elif part.kind == "math":
            self.release()
            self.equation = self.make("statement", [part])
        else:
            self.release()
            slide = self.make("statement", [part])
            latest = self.deck.columns[-1][1][-1]
            if part.kind == "list" and latest.kind != "section" and waits_for_words(latest):
                latest.parts += slide.parts
                latest.notes += slide.notes
            else:
                self.add(slide)

    def read_paragraph(self, paragraph: str) -> None:
        latest = self.deck.columns[-1][1][-1]
        said = MARKDOWN.render(paragraph)
        if latest.kind == "title" and not latest.parts:
            first, *rest = sentences(paragraph)
            latest.parts.append(Part("text", first))
            self.paragraph = " ".join(rest)
        elif not self.notes and waits_for_words(latest):
            shown = opening(paragraph)
            latest.parts += [Part("text", shown)] if shown else []
            latest.notes += said
            rest = " ".join(paragraph.split())[len(shown) :].strip()
            self.paragraph = rest if leads_on(paragraph) else ""
        else:
            self.notes.append(said)
            self.paragraph = paragraph
            if self.result:
                words, self.paragraph = remark(paragraph)
                self.result.parts += [Part("remark", words)] if words else []

    def read_code(self, cell: NotebookNode, tags: set[str]) -> None:
        if tags & LEFT_OUT or is_page(cell) or self.head.startswith(HOMEWORK):
            if cell.outputs:
                self.result = None  # the text speaks of what no slide shows
            if "figure" in tags and picture(cell):
                self.figures += 1  # the page has it, and numbers the others after it
            return
        elif "figure" in tags:
            drawn = picture(cell)
            if drawn:
                self.figures += 1
                drawn_as = drawn, self.figures
                self.pictures |= dict.fromkeys(NAMED.findall(cell.source)[:1], drawn_as)
                self.release()
                slide = self.make("figure", [drawn])
                slide.figure = self.figures
                slide.notes += f"<p>In the picture: {escape(drawn.alt, quote=False)}</p>"
                self.add(slide)
        else:
            shown = [*code(cell.source), *printed(cell)]
            if re.fullmatch(r"([✓✗].*\n?)+", shown[0].source if shown else ""):
                shown = []  # "✓ equal" says nothing without the lines that it is said of
            if self.equation:
                slide, self.equation = self.equation, None
                slide.kind, slide.parts = "cell", slide.parts + shown
                slide.message = self.message or slide.message
                slide.wanted = self.wanted or slide.wanted
                slide.notes += "".join(self.notes)
                self.add(slide)
            elif shown and self.paragraph:
                self.add(self.make("cell", shown))


def deck_of(notebook: NotebookNode) -> Deck:
    """The slides of an executed notebook."""
    return Chapter(notebook).deck
