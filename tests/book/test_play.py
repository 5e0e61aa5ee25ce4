"""The interactive pages, from the folder: their numbers against the package, their behaviour."""

import base64
import shutil
from itertools import pairwise, product
from random import Random

import browser as chrome
import pytest
import torch
import torch.nn.functional as F

from book.project import ROOT
from book.site import interactive_pages as play
from cheems_lab.__main__ import main
from cheems_ref import budget, config, linear_attention, model, presets, ssd, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("site") / "play"
    play.make(ROOT, made)
    return made


@pytest.fixture
def visit(browser, folder):
    """Opens a page by its name, from the folder."""
    return lambda name, **how: chrome.visit(browser, (folder / f"{name}.html").as_uri(), **how)


@pytest.mark.parametrize("page", play.PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize("how", [dict(), dict(size=chrome.PHONE, dark=True)], ids=["desk", "phone"])
def test_a_page_suits_everyone(visit, page, how):
    """Desktop in light, phone in dark; a picture stands for the script, and the chapter is near."""
    with visit(page.name, **how) as opened:
        assert page.figure in opened.content() and page.chapter in opened.content()
        assert chrome.raw_math(opened) == [] and chrome.too_wide(opened) == []
        assert opened.problems == []  # before axe, which asks for the style sheet once more
        assert chrome.axe(opened) == []


def test_on_a_phone_no_prediction_covers_the_next(visit):
    with visit("cheems", size=chrome.PHONE) as opened:
        opened.locator("#next button").first.wait_for()
        over = "all => all.filter(b => b.scrollWidth > b.clientWidth).map(b => b.textContent)"
        assert opened.locator("#next li:nth-child(-n + 6) button").evaluate_all(over) == []


def test_the_pages_lead_to_each_other_and_wear_the_theme_of_the_site(visit, folder):
    names = {page.name for page in play.PAGES}
    for page in play.PAGES:
        text = (folder / f"{page.name}.html").read_text(encoding="utf-8")
        assert names - {name for name in names if f'href="{name}.html"' in text} == {page.name}
    with visit("memory", dark=True) as opened:
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = opened.evaluate(ground)
        for word in ("system", "light", "dark"):
            assert opened.locator("#theme").inner_text() == f"Theme: {word}"
            assert (opened.evaluate(ground) == dark) == (word != "light")
            opened.locator("#theme").click()
        opened.locator("#theme").click()
        opened.reload()  # it is kept where the site's own pages look for it
        assert opened.evaluate("localStorage.getItem('theme')") == "light"
        assert opened.evaluate(ground) != dark


# --- One memory, five rules -----------------------------------------------------------------------


def written(now, data):
    """Keys (1, l, 1, n) and values (1, l, 1, 10) of the cards that were written."""
    keys = data["keys"][now["keys"]][now["n"]]
    places = [data["names"].index(card["name"]) for card in now["writes"]]
    k = torch.tensor([keys[place] for place in places], dtype=torch.float64)
    v = F.one_hot(torch.tensor([card["digit"] for card in now["writes"]]), 10).double()
    return k[None, :, None], v[None, :, None]


def test_the_memory_is_that_of_the_package(visit):
    """States after every card, and what each name reads, to 1e-12; attention over the cache too."""
    draw, data = Random(0), play.memory()
    for n, rows in data["keys"]["orthogonal"].items():
        rows = torch.tensor(rows[:n], dtype=torch.float64)
        torch.testing.assert_close(rows @ rows.T, torch.eye(n).double(), atol=1e-12, rtol=0)
    with visit("memory") as page:
        kinds = product(linear_attention.RULES.items(), ("random", "orthogonal"), (4, 8, 16))
        for (rule, (function, takes)), keys, n in kinds:
            writes = [draw.choice(data["cards"]) for _ in range(12)]
            writes = [dict(card, digit=draw.randrange(10)) for card in writes]
            now = dict(rule=rule, n=n, keys=keys, writes=writes)
            now |= dict(alpha=draw.uniform(0.5, 1), beta=draw.uniform(0, 2))
            names = sorted({card["name"] for card in writes})
            told = "(now, names) => [states(now), names.map(name => attend(now, name))]"
            shown = page.evaluate(f"([now, names]) => ({told})(now, names)", [now, names])
            k, v = written(now, data)
            gates = dict(g=torch.full_like(k[..., 0], now["alpha"]).log())
            gates["beta"] = torch.full_like(k[..., 0], now["beta"])
            for count in range(1, 13):
                inputs = [x[:, :count] for x in (k, k, v, *(gates[name] for name in takes))]
                _, state = function(*inputs, return_final_state=True)
                mine = torch.tensor(shown[0][count], dtype=torch.float64)
                torch.testing.assert_close(mine, state[0, 0], atol=1e-12, rtol=0)
            rows = [data["keys"][keys][n][data["names"].index(x)] for x in names]
            q = torch.tensor(rows, dtype=torch.float64)
            shares = (64 * q @ k[0, :, 0].T).softmax(-1) @ v[0, :, 0]
            torch.testing.assert_close(
                torch.tensor(shown[1], dtype=torch.float64), shares, atol=1e-12, rtol=0
            )


def first_mistake(data, n, delta):
    """The card with which a name is first answered wrongly."""
    state, keys = torch.zeros(10, n).double(), torch.tensor(data["keys"]["random"][n]).double()
    digits = torch.tensor([card["digit"] for card in data["cards"]])
    for count, (k, digit) in enumerate(zip(keys, digits, strict=True), start=1):
        missing = F.one_hot(digit, 10).double() - (state @ k if delta else 0)
        state = state + torch.outer(missing, k)
        if ((state @ keys[:count].T).argmax(0) != digits[:count]).any():
            return count
    return len(keys) + 1


def right_of_all(keys, cards):
    """How many names linear attention answers right once all cards are written, by the package.

    A number within 1 percent of the largest ties with it, and then the name isn't answered.
    """
    keys = torch.tensor(keys, dtype=torch.float64)
    digits = torch.tensor([card["digit"] for card in cards])
    k, v = keys[None, :, None], F.one_hot(digits, 10).double()[None, :, None]
    _, state = linear_attention.linear_attention(k, k, v, return_final_state=True)
    read = keys @ state[0, 0].T
    best = read > read.amax(-1, keepdim=True) * 0.99
    return int((best == F.one_hot(digits, 10).bool()).all(-1).sum())


def test_the_keys_are_neither_lucky_nor_unlucky():
    draws = [play.memory(seed) for seed in range(101)]
    for n, delta in product((4, 8, 16), (False, True)):
        usual = sorted(first_mistake(data, n, delta) for data in draws)[50]
        assert abs(first_mistake(play.memory(), n, delta) - usual) <= n / 8, (n, delta)
    for n in (4, 8, 16):
        counts = [right_of_all(data["keys"]["random"][n], data["cards"]) for data in draws]
        mine = right_of_all(play.memory()["keys"]["random"][n], play.memory()["cards"])
        assert abs(mine - sum(counts) / 101) < 1.5, n  # so that a wider state keeps more


def test_cards_are_written_rewritten_and_answered(visit):
    """The question on the page, by keyboard: what it counts and what it says is what happened."""
    with visit("memory", size=chrome.PHONE) as page:
        told, answers = page.locator("#told"), page.locator("#answers button")
        assert answers.count() == 3 and told.inner_text().endswith("No ✗ so far.")
        for _ in range(6):
            page.locator("#write").press("Space")
        assert told.inner_text().endswith("The first ✗ came with card 9.")
        assert answers.count() == 9 and page.locator("#cache li").count() == 9
        assert page.locator("#cache-count").inner_text() == str(9 * (8 + 10))
        assert page.locator("#state-count").inner_text() == "80"
        right = [page.locator(f"#answers .{word}").count() for word in ("right", "wrong")]
        assert (
            f"{right[0] - 9} of 9" in told.inner_text() and sum(right) == 18
        )  # the cache is right
        page.locator("#again").press("Enter")
        assert answers.count() == 3 and page.evaluate("now.chosen") == "cyd"  # as the page opens
        page.locator("#write").press("Enter")
        page.locator("#rewrite").press("Enter")
        said = {}
        for rule in linear_attention.RULES:
            page.locator("#rule").select_option(rule)
            said[rule] = answers.first.locator("span").all_inner_texts()[1]
            assert answers.first.locator("span").all_inner_texts()[2] == "3=5 ✗"  # of the cache
        assert said.pop("linear attention") == "3=5 ✗" and set(said.values()) == {"5 ✓"}
        answers.nth(1).press("Enter")
        assert page.evaluate("now.chosen") == "bob" and page.problems == []
        assert answers.nth(1).evaluate("one => one === document.activeElement")


def test_new_keys_show_what_was_chance(visit):
    """Counts for each width, and their means over the draws, are those of the package."""
    data = play.memory()
    with visit("memory", size=chrome.PHONE) as page:
        assert page.locator("#luck").inner_text() == ""  # no count before the reader's own guess
        for _ in range(4):
            page.locator("#redraw").press("Enter")
        draws, luck = page.evaluate("draws"), page.locator("#luck").inner_text()
        assert len({str(keys) for keys in draws}) == 5 and "draw 5" in luck
        assert draws[0] == {str(n): rows for n, rows in data["keys"]["random"].items()}
        for n in (4, 8, 16):
            lengths = torch.tensor([keys[str(n)] for keys in draws], dtype=torch.float64).norm(
                dim=-1
            )
            torch.testing.assert_close(lengths, torch.ones(5, 16).double(), atol=1e-12, rtol=0)
            counts = [right_of_all(keys[str(n)], data["cards"]) for keys in draws]
            assert f"n = {n}: {counts[-1]} (mean {sum(counts) / 5:.1f})" in luck


def test_two_cards_of_one_key_tie_in_the_cache(visit):
    """Orthogonal keys for 16 names come twice, and ann's key has two values once rewritten."""
    with visit("memory") as page:
        page.locator("#keys").select_option("orthogonal")
        for _ in range(13):
            page.locator("#write").press("Enter")
        verdicts = page.locator("#answers button").evaluate_all(
            "all => all.map(b => [...b.querySelectorAll('span')].map(s => s.textContent).slice(1))"
        )
        digits = [card["digit"] for card in play.memory()["cards"]]
        pairs = [sorted((digits[i % 8], digits[i % 8 + 8])) for i in range(16)]
        tied = [f"{a}={b} ✗" if a != b else f"{a} ✓" for a, b in pairs]
        assert verdicts == [[word, word] for word in tied]  # of the state, and of the cache
        page.locator("#keys").select_option("random")
        page.locator("#rewrite").press("Enter")
        cache = page.locator("#answers button").first.locator("span").last
        for n in ("4", "8", "16"):
            page.locator("#n").select_option(n)
            assert cache.inner_text() == "3=5 ✗"
        near = "[[0.501, 0.499, 0], [0.51, 0.49, 0], [-2, -1, -1.009]].map(winners)"
        assert page.evaluate(near) == [[0, 1], [0], [1, 2]]  # as if keys of other names were near


def test_after_the_last_card_the_page_says_what_was_erased(visit):
    """What each rule leaves of ann's first value, against the rule run on her value alone."""
    data = play.memory()
    with visit("memory") as page:
        luck = page.locator("#luck")
        for _ in range(13):
            assert luck.inner_text() == ""
            page.locator("#write").press("Enter")
        k, v = written(dict(keys="random", n=8, writes=data["cards"]), data)
        v[:, 1:] = 0
        gates = dict(g=torch.full_like(k[..., 0], 0.9).log(), beta=torch.ones_like(k[..., 0]))
        for rule, (function, takes) in linear_attention.RULES.items():
            page.locator("#rule").select_option(rule)
            inputs = (k, k, v, *(gates[name] for name in takes))
            _, state = function(*inputs, return_final_state=True)
            left = float(state[0, 0, 3] @ k[0, 0, 0])
            said = f"still reads {left:.2f};" if takes else "No card takes anything"
            assert said.replace("-", "−") in luck.inner_text()
            assert ("erases" in luck.inner_text()) == ("beta" in takes)


def test_cells_and_bars_of_the_memory_say_their_numbers(visit):
    with visit("memory") as page:
        said, value = page.locator("#pointed"), page.evaluate("states(now).at(-1)[3][4]")
        page.locator("#state .cell").nth(3 * 8 + 4).hover()
        assert said.inner_text() == f"S, row 3, column 5: {value:.2f}"
        key = page.evaluate("keyOf('cyd', now)")
        page.locator("#state .cell").nth(10 * 8 + 7).hover()
        assert said.inner_text() == f"key of cyd, entry 8: −{-key[7]:.2f}"
        colors = (
            page.locator("#cache li")
            .nth(2)
            .locator("i")
            .evaluate_all("all => all.map(i => i.style.background)")
        )
        assert colors == [f"var(--{'pink' if x < 0 else 'blue'})" for x in key]
        page.locator("#state [data-words^='cyd reads']").nth(7).hover()
        assert said.inner_text() == "cyd reads of the number 7: 1.00"


def test_on_a_phone_the_answers_stand_below_the_button(visit):
    with visit("memory", size=chrome.PHONE) as page:
        page.locator("#write").press("Enter")
        answers = page.locator("#answers button").count()
        assert page.locator("#strip > span").count() == answers == 4
        button, strip = (page.locator(x).bounding_box() for x in ("#write", "#strip"))
        assert strip["y"] + strip["height"] - button["y"] < chrome.PHONE[1] / 2


# --- The matrix -----------------------------------------------------------------------------------


def test_the_matrix_is_that_of_the_package(visit):
    """Entries to 1e-6 and ranks; a reset is a step of 1e4 whose B is as much smaller."""
    draw, data = Random(0), play.matrix()
    with visit("matrix") as page:
        for n in (1, 2, 3) * 4:
            A, dt = -draw.uniform(0.5, 2), [draw.choice((0, draw.random())) for _ in data["dt"]]
            reset = [draw.random() < 0.15 for _ in dt]
            borders = sorted(draw.sample(range(1, 12), k=draw.randint(1, 5)))
            now = dict(A=A, dt=dt, reset=reset, n=n, borders=borders)
            shown = page.evaluate("now => [matrix(now), ranks(now), fourSteps(now).y]", now)
            steps, faded = torch.tensor(dt).double(), torch.tensor(reset)
            B, C = (torch.tensor(data[x]).double()[:, :n] for x in "BC")
            B = torch.where(faded, steps / 1e4, 1)[:, None] * B
            steps = torch.where(faded, 1e4, steps)
            tensors = (steps[None, :, None], torch.tensor([A]).double(), B[None, :, None])
            M = ssd.semiseparable_matrix(*tensors, C[None, :, None])[0, 0]
            torch.testing.assert_close(torch.tensor(shown[0]).double(), M, atol=1e-6, rtol=0)
            summed = torch.tensor(shown[0], dtype=torch.float64).sum(-1)
            mine = torch.tensor(shown[2], dtype=torch.float64)  # by the four steps
            torch.testing.assert_close(mine, summed, atol=1e-12, rtol=0)
            edges = [0, *borders, 12]
            assert len(shown[1]) == len(borders) * (len(borders) + 1) // 2
            for block in shown[1]:
                rows, columns = (slice(edges[block[x]], edges[block[x] + 1]) for x in "ij")
                assert block["rank"] == torch.linalg.matrix_rank(M[rows, columns])


def test_an_entry_of_the_matrix_is_chosen_by_pointer_and_keys(visit):
    with visit("matrix") as page:
        lit = page.locator("#lit b").last
        matrix, x = page.locator("#matrix"), page.locator("#matrix").bounding_box()["width"] / 13
        matrix.click(position=dict(x=4.5 * x, y=9.5 * x))  # t = 8, s = 3
        matrix.press("ArrowDown")
        entry = page.evaluate("matrix(now)[9][3]")
        assert lit.inner_text() == f"{entry:.3f}"
        page.locator("#reset-7").press("Space")
        assert lit.inner_text() == "0"
        assert page.locator("#lit").inner_text().endswith(" = 0, since α7 = 0")
        page.locator("#dt-3").press("ArrowUp")
        assert page.evaluate("now.dt[3]") == pytest.approx(play.matrix()["dt"][3] + 0.05)


def test_a_click_holds_an_entry_and_the_mouse_looks_at_others(visit):
    """The page's first experiment: hold an entry, move a slider elsewhere, and watch the entry."""
    with visit("matrix") as page:
        matrix, lit = page.locator("#matrix"), page.locator("#lit b")
        x = matrix.bounding_box()["width"] / 13
        matrix.click(position=dict(x=3.5 * x, y=9.5 * x))
        matrix.hover(position=dict(x=1.5 * x, y=6.5 * x))
        assert lit.first.inner_text() == "M5,0"
        page.locator("#dt-5").hover()
        assert lit.first.inner_text() == "M8,2" and page.evaluate("[now.t, now.s]") == [8, 2]
        page.locator("#dt-5").press("ArrowUp")
        assert lit.last.inner_text() == f"{page.evaluate('matrix(now)[8][2]'):.3f}"
        stops = "document.querySelectorAll('#app :is(input, select, button, [tabindex])')[0].id"
        assert page.evaluate(stops) == "matrix"  # the first that the keyboard comes to
        assert page.evaluate("getComputedStyle($('matrix')).touchAction") == "none"


def test_borders_are_dragged_and_the_four_steps_run(visit):
    with visit("matrix") as page:
        box = page.locator("#matrix").bounding_box()
        x = box["width"] / 13
        corner = [box["x"] + 5 * x, box["y"] + 5 * x]  # of tokens 3 and 4
        page.mouse.move(*corner)
        page.mouse.down()
        page.mouse.move(corner[0] + 2.1 * x, corner[1] + 1.9 * x, steps=4)
        page.mouse.move(corner[0] + 9 * x, corner[1] + 9 * x)  # not past the next border
        assert page.evaluate("now.borders") == [7, 8]
        page.mouse.move(corner[0] + 2.1 * x, corner[1] + 1.9 * x)
        page.mouse.up()
        page.mouse.move(corner[0], corner[1])
        assert page.evaluate("now.borders") == [6, 8] and page.evaluate("now.t") == 8
        assert page.locator("#chunk").input_value() == "free"
        page.locator("#chunk").select_option("3")
        assert page.evaluate("now.borders") == [3, 6, 9]
        for word in ("inside", "write", "carry", "read"):
            page.locator("#next").press("Enter")
            assert f"{word}." in page.locator("#step b").inner_text()
        said = page.locator("#step").inner_text()
        assert float(said.split("differ by ")[1].rstrip(".")) < 1e-14 and page.problems == []


def test_a_border_moves_by_keyboard_and_a_release_looks_where_the_mouse_is(visit):
    with visit("matrix") as page:
        page.locator("#borders input").nth(1).press("ArrowRight")
        assert page.evaluate("now.borders") == [4, 9]
        box = page.locator("#matrix").bounding_box()
        x = box["width"] / 13
        page.mouse.move(box["x"] + 5 * x, box["y"] + 5 * x)
        page.mouse.down()
        page.mouse.move(box["x"] + 7.3 * x, box["y"] + 7.3 * x)
        page.mouse.up()
        assert page.evaluate("[now.borders, preview]") == [[6, 9], dict(t=6, s=6)]


def test_the_carried_state_travels_and_no_path_crosses_it(visit):
    with visit("matrix") as page:
        path = page.locator("#matrix rect[height='7'][stroke='var(--orange)']")
        assert path.count() == 1  # of the held entry, from token 2 to token 8
        for _ in range(3):
            page.locator("#next").press("Enter")
        assert path.count() == 0 and page.locator("#matrix .carried").count() == 2
        style = "one => getComputedStyle(one).animationName"
        assert page.locator("#matrix .carried").first.evaluate(style) == "carry"
        page.emulate_media(reduced_motion="reduce")
        assert page.locator("#matrix .carried").first.evaluate(style) == "none"


def test_nothing_is_drawn_where_nothing_flows(visit):
    """With a reset where a chunk begins, or a chunk that writes nothing; the held entry hides."""
    with visit("matrix") as page:
        lines = page.locator("#matrix path[stroke='var(--green)']")
        page.locator("#reset-4").press("Space")
        for dt in ("dt-4", "dt-5", "dt-6", "dt-7"):
            page.locator(f"#{dt}").press("Home")
        for expected in (0, 1, 0, 0):  # only the first chunk writes, and token 4 forgets it
            page.locator("#next").press("Enter")
            assert lines.count() == expected and page.locator("#lit").inner_text() == ""
            assert page.locator("#matrix .carried").count() == 0
            page.locator("#matrix").press("ArrowUp")
            assert page.locator("#app [stroke='var(--orange)']").count() == 0
        page.locator("#reset-4").press("Space")
        assert lines.count() == 2
        page.locator("#next").press("Enter")
        assert page.locator("#lit b").first.inner_text() == "M8,2"
        up = page.locator("#chain line[x1='5.5'][x2='5.5']")
        assert up.count() == 1  # to y; nothing comes from x


def test_the_answer_to_the_question_is_what_the_page_shows(visit):
    with visit("matrix") as page:
        assert "falls to rank 0" not in page.locator("main").inner_text()
        page.locator("summary").click()
        assert "falls to rank 0" in page.locator("main").inner_text()
        for n, before, after in ((2, [2, 2, 2], [2, 0, 2]), (3, [3, 3, 3], [2, 0, 2])):
            page.locator("#n").select_option(str(n))
            assert page.evaluate("ranks(now).map(block => block.rank)") == before
            page.locator("#reset-6").press("Space")
            assert page.evaluate("ranks(now).map(block => block.rank)") == after
            page.locator("#reset-6").press("Space")


@pytest.mark.parametrize("size", [chrome.DESKTOP, (390, 844)], ids=["desk", "phone"])
def test_the_ranks_are_seen_where_the_state_is_reset(visit, size):
    """The rank of the lowest block and the resets, in one window."""
    with visit("matrix", size=size) as page:
        page.locator("#reset-6").scroll_into_view_if_needed()
        boxes = [page.locator("#reset-6").bounding_box()]
        boxes.append(page.locator("#matrix .rank").nth(1).bounding_box())
        assert all(0 <= box["y"] <= size[1] - box["height"] for box in boxes)
        assert boxes[0]["y"] - boxes[1]["y"] < 400  # nothing but the sliders between them


# --- The pattern ----------------------------------------------------------------------------------


def costs(c, context):
    """What the page computes: parameters by part, FLOPs by part, bytes of cache."""
    parameters = {part: [*both] for part, both in budget.count_parameters(c).items()}
    flops = budget.count_flops(c, 1, context=context)
    cache = budget.cache_bytes(c, context)._asdict()
    return [parameters, {part: kinds.total() for part, kinds in flops.items()}, cache]


def random_config(draw, inner, mask):
    """A pattern of a few letters with an I, and sizes that may come from any field."""
    h, k = draw.choice((1, 2, 4)), draw.choice((1, 2, 3))
    given = dict(n_heads=h, d_model=h * draw.choice((4, 6, 10)), k_experts=k, n_neurons=k * k)
    given |= dict(n_kv_heads=draw.choice((None, 1, h)), n_groups=draw.choice((1, h)), k_neurons=k)
    given |= dict(d_head=draw.choice((None, 5)), position=draw.choice(("rope", "conv", "decay")))
    given |= dict(inner=inner, mask=mask, max_positions=9, tie_embeddings=draw.random() < 0.5)
    given |= dict(d_private=draw.choice((None, 3)), d_state=2 * draw.randint(1, 9), d_query=6)
    for name in ("vocab_size", "d_conv", "n_values", "d_ff", "n_experts", "n_retrieval_heads"):
        given[name] = draw.randint(3, 30)
    letters = "".join(draw.choices([*config.LAYERS], k=draw.randint(1, 4)))
    return given | dict(pattern=f"({letters}) × {draw.randint(1, 3)} + {draw.choice('SA')}I")


def test_costs_of_a_pattern_are_those_of_the_package(visit):
    """To the digit: for every preset at 100 tokens, for random patterns at others."""
    draw = Random(0)
    cases = [(given, 100) for given in presets.PRESETS.values()]
    edges = [dict(pattern="S"), dict(pattern="I", k_values=16)]
    edges.append(dict(pattern="SK", d_model=7, d_head=5))
    cases += [(given, 9) for given in edges]
    kinds = product(("ssd", "retrieved", "linear"), (None, "gate", "content"))
    cases += [(random_config(draw, *kind), draw.randint(0, 50)) for kind in kinds]
    with visit("pattern") as page:
        shown = page.evaluate(
            "cases => cases.map(([given, t]) => { const c = configure(given);"
            " return [countParameters(c), countFlops(c, t), cacheBytes(c, t)]; })",
            cases,
        )
        assert page.locator("#total-value").inner_text() == "320,113,140"  # cheems-320m
    for (given, context), numbers in zip(cases, shown, strict=True):
        assert numbers == costs(config.ModelConfig(**given), context), given


WRONG = ["SZ", "(SM", "S × 0", "S M × x", "M", "SM × 20000", "(A × 3) × 0", "S'M"]
WRONG = [dict(pattern=pattern) for pattern in WRONG]
WRONG += [dict(n_heads=3), dict(d_model=2.5), dict(d_state=3), dict(n_neurons=15), dict(d_ff=0)]
WRONG += [dict(pattern="AR", k_experts=9), dict(n_values=1), dict(d_query=3), dict(k_neurons=999)]
WRONG += [dict(mask="gate"), dict(vocab_size=2**31), dict(pattern="A", n_kv_heads=3)]
WRONG += [dict(pattern="S", n_groups=3), dict(pattern="R", n_experts=99_999), dict(n_heads=128)]
WRONG += [dict(pattern="IE", inner="ssd", d_state=5)]


def typed(page, pattern):
    """Type a pattern, and Enter: it counts at once."""
    page.locator("#pattern").fill(pattern)
    page.locator("#pattern").press("Enter")


def test_axes_stay_when_the_pattern_changes(visit):
    """Else a curve that rises by a power of ten would be drawn where it was."""
    with visit("pattern") as page:
        texts = "[...$('bytes').querySelectorAll('text:not(.crossing + text)')]"
        axes = f"{texts}.map(one => one.outerHTML).join()"
        dots = "Number($('bytes').querySelector('circle').getAttribute('cy'))"
        before = page.evaluate(f"[{axes}, {dots}]")
        typed(page, "IE × 24")
        after = page.evaluate(f"[{axes}, {dots}]")
        assert before[0] == after[0] and after[1] < before[1] - 10
        assert page.locator("#bytes-factor").inner_text() == "× 7.95 of the preset"


def test_small_letters_and_clicks_make_a_pattern(visit):
    with visit("pattern") as page:
        pattern, tiles = page.locator("#pattern"), page.locator("#stack .letter")
        for words, meant in (("ie x 24", "IE × 24"), ("sx × 2", "SX × 2"), ("x x 3 s", "X × 3 S")):
            typed(page, words)
            assert page.locator("#message").inner_text() == ""
            assert "".join(tiles.all_text_contents()) == config.expand_pattern(meant)
        typed(page, "SEIE")
        tiles.nth(0).press("Enter")
        assert pattern.input_value() == "IEIE" and tiles.nth(0).inner_text() == "I"
        tiles.nth(2).click()
        assert pattern.input_value() == "IESE"
        pattern.evaluate("one => one.setSelectionRange(2, 2)")
        page.locator("#letters .A").click()
        assert pattern.input_value() == "IEASE" and tiles.count() == 5
        assert page.problems == [] and chrome.axe(page) == []


def test_what_is_half_typed_waits(visit):
    """Keys count after half a second without another, or with Enter; meanwhile the model stays."""
    with visit("pattern") as page:
        pattern, message = page.locator("#pattern"), page.locator("#message")
        page.clock.install()
        pattern.fill("")
        for key in "SQ":
            pattern.press(key)
            page.clock.run_for(400)
            assert message.inner_text() == ""
            assert page.locator("#total-value").inner_text() == "320,113,140"
        page.clock.run_for(200)
        assert message.inner_text().startswith("unknown letter 'Q'")
        assert page.locator("#total-value").inner_text() == "320,113,140"
        pattern.press("Backspace")
        pattern.press("Enter")
        assert message.inner_text() == "" and page.locator("#stack .letter").count() == 1
        tile = page.locator("#stack .letter")
        tile.focus()
        page.clock.run_for(600)  # Enter has come before, so nothing is drawn anew
        assert tile.evaluate("one => one === document.activeElement")
        page.locator("#d_model").fill("7")  # of 768
        page.clock.run_for(400)
        assert message.inner_text() == ""
        page.clock.run_for(200)
        assert "d_model = 7 must be a multiple of n_heads" in message.inner_text()


def test_a_click_on_a_letter_can_be_undone(visit):
    with visit("pattern") as page:
        pattern, undo = page.locator("#pattern"), page.locator("#undo")
        typed(page, "(SE × 7 + IE) × 3")
        assert undo.is_disabled()
        page.locator("#stack .letter").first.click()
        page.locator("#letters .A").click()
        assert len(pattern.input_value()) == 49
        undo.click()
        assert len(pattern.input_value()) == 48
        undo.click()
        assert pattern.input_value() == "(SE × 7 + IE) × 3" and undo.is_disabled()
        assert page.locator("#stack .letter").first.inner_text() == "S"
        page.locator("#stack .letter").first.click()
        page.locator("#preset").select_option("cheems-1.3b")
        assert undo.is_disabled()  # it would bring back a pattern of another preset


def test_from_the_pattern_to_the_context_it_is_few_tabs(visit):
    """A row of letters is one tab stop; the arrow keys move in it, and a click keeps the place."""
    with visit("pattern") as page:
        typed(page, "SE × 7 + IE")
        at = "document.activeElement.id || document.activeElement.parentElement.closest('[id]').id"
        stops = []
        while "context" not in stops:
            page.keyboard.press("Tab")
            stops.append(page.evaluate(at))
        assert stops == ["stack", "letters", "context"]
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Shift+Tab")
        for key in ("ArrowRight", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        assert page.locator("#pattern").input_value() == "SESEIESESESESEIE"
        page.keyboard.press("Tab")
        page.keyboard.press("Shift+Tab")
        tiles = page.locator("#stack .letter")
        assert tiles.nth(4).evaluate("one => one === document.activeElement")
        page.keyboard.press("End")
        assert tiles.nth(14).evaluate("one => one === document.activeElement")


def test_numbers_of_an_earlier_pattern_are_grey_while_the_pattern_is_wrong(visit):
    with visit("pattern") as page:
        grey = "getComputedStyle(document.querySelector('dl')).opacity"
        for wrong in ("Q", "(SE"):
            typed(page, "SE")
            assert page.evaluate(grey) == "1"
            typed(page, wrong)
            assert float(page.evaluate(grey)) < 0.5
        page.locator("#preset").select_option("cheems-320m")
        assert page.evaluate(grey) == "1"
        page.locator("#d_model").fill("777")
        page.locator("#d_model").press("Enter")
        assert float(page.evaluate(grey)) < 0.5


def test_a_model_without_states_is_cheaper_only_in_a_short_context(visit):
    """What the page asks: from which context on the cache of IE × 24 is the larger."""
    with visit("pattern") as page:
        typed(page, "IE × 24")
        ours = presets.PRESETS["cheems-320m"]
        both = [config.ModelConfig(**ours | dict(pattern="IE × 24")), config.ModelConfig(**ours)]
        for power in (6, 7, 17):
            page.locator("#context").fill(str(power))
            own, preset = (budget.cache_bytes(c, 2**power).total() for c in both)
            said = page.locator("#bytes-factor").inner_text()
            decimals = 3 if power == 7 else 2  # at 128 it's 1.002
            assert said == f"× {own / preset:.{decimals}f} of the preset"
            assert (own > preset) == (power > 6)
        mark = page.locator(".crossing + text")  # of the cache: the operations are more everywhere
        first = int(mark.text_content())
        for context in (first - 1, first):
            own, preset = (budget.cache_bytes(c, context).total() for c in both)
            assert (own > preset) == (context == first)


def test_a_wrong_pattern_is_refused_in_the_words_of_the_package(visit):
    with visit("pattern") as page:
        for given in WRONG:
            with pytest.raises((ValueError, TypeError)) as refused:
                config.ModelConfig(**given)
            page.evaluate("given => { fill({ pattern: 'SEIE', ...given }); show(); }", given)
            assert page.locator("#message").text_content() == str(refused.value)
        for given in ("", "  "):
            typed(page, given)
            said = page.locator("#message").inner_text()
            assert said == "A pattern needs at least one letter."
        page.locator("#preset").select_option("cheems-1.3b")
        typed(page, "SE × 7 + IE")
        page.locator("#context").press("Home")
        c = config.ModelConfig(**presets.PRESETS["cheems-1.3b"] | dict(pattern="SE × 7 + IE"))
        assert page.locator("#bytes-value").inner_text() == f"{budget.cache_bytes(c, 64).total():,}"
        assert page.locator("#stack .letter").count() == 16
        own, preset = (
            budget.cache_bytes(one, 64).total() for one in (c, config.preset("cheems-1.3b"))
        )
        said = page.locator("#bytes-factor").inner_text()
        assert said == f"× {own / preset:.2f} of the preset" and own < preset
        assert page.locator("#bytes-words").inner_text() == f"{own / 2**20:.2f} MiB"
        assert page.locator("#message").inner_text() == ""


# --- A Cheems in the page -------------------------------------------------------------------------

LICENSE = str(ROOT / "LICENSE")
BANDS = "bands(chosen).filter(band => band.what !== 'attention').map(band => band.rows)"
SIZES = "d_model=24 n_heads=2 d_state=10 rope_base=50.0 n_values=5 k_values=3 mask=content d_ff=20 "
SIZES += "n_neurons=49 k_neurons=9 n_retrieval_heads=3 d_query=6 norm_eps=0.1"
OWN = f"--pattern ISE --set {SIZES.replace(' ', ' --set ')} --steps 1 --seq-len 9 --seed 3"


@pytest.fixture(scope="module", params=["ours", "own"])
def with_model(request, folder, tmp_path_factory):
    """The pages with their model, and with one of other sizes from a run of one step."""
    if request.param == "ours":
        return folder
    made, run = tmp_path_factory.mktemp("own") / "play", tmp_path_factory.mktemp("run")
    shutil.copytree(folder, made)
    assert main(["train", "--text", LICENSE, "--run", str(run), *OWN.split()]) == 0
    play.write_cheems(run, made / "cheems_weights.js")
    return made


def model_of(data):
    """The package's model with the weights of the page."""
    lm = model.CausalLM(config.ModelConfig(**data["config"])).double().requires_grad_(False)
    for name, parameter in lm.named_parameters():
        numbers = bytearray(base64.b64decode(data["weights"][name]["float16"]))
        parameter.copy_(torch.frombuffer(numbers, dtype=torch.float16).view_as(parameter))
    return lm


def drawn(layer, x, cache):
    """What the page draws of a layer for the last token: rows over all tokens. Of I, the mask."""
    if isinstance(layer, ssd.SSD):
        dt, one = F.softplus(layer.dt_proj(x) + layer.dt_bias), torch.ones_like(x[:, :, None, :1])
        return ssd.semiseparable_matrix(dt, -layer.A_log.exp(), one, one)[0, :, -1] / dt[0].T
    if cache is None:
        experts = layer.route(x)[1][0]  # (l, h, k)
        return (experts[..., None] == experts[-1][:, None]).any(-1).double().mean((1, 2))[None]
    return 1 - layer.mask(cache.v, cache.position_ids)[0].exp()


def test_a_cheems_computes_what_the_package_computes(browser, with_model):
    """Logits and pictures, to 1e-5. The second text begins as the first."""
    with chrome.visit(browser, (with_model / "cheems.html").as_uri()) as page:
        data, inputs = page.evaluate("CHEEMS"), []
        lm = model_of(data)
        for block in lm.blocks:
            block.layer.register_forward_pre_hook(lambda layer, x: inputs.append((layer, x[0])))
        for typed in ("The value of (x, y", "The value, né\n    zqx" + 5 * " and so on"):
            page.locator("#text").fill(typed)
            shown = page.evaluate(f"[tokens.map(t => t.logits), ...{BANDS}]")
            inputs.clear()
            logits, cache = lm(text.text_to_ids(typed)[None])
            pairs = zip(inputs, cache.layers, strict=True)
            expected = [logits[0], *(drawn(*both, held) for both, held in pairs)]
            for mine, theirs in zip(shown, expected, strict=True):
                assert (torch.tensor(mine).double() - theirs).abs().max() < 1e-5
        assert page.locator("#held-out").text_content() == f"{data['record']['held_out']:.2f}"
    assert data["record"]["text"] != LICENSE or data["record"]["command"].endswith(OWN)


def without(lm, away):
    """The package's model with a layer, "6", or a head of one, "6.3", taken away."""
    number, _, head = away.partition(".")
    layer = lm.blocks[int(number)].layer
    if not head:

        def nothing(layer, inputs, output):
            return (0 * output[0], output[1]) if isinstance(output, tuple) else 0 * output

        return layer.register_forward_hook(nothing)
    if hasattr(layer, "experts"):

        def of_experts(experts, inputs, output):
            gates, places = route(inputs[0])
            found = gates[:, :, int(head)], places[:, :, int(head)]
            down, up = (table[found[1]] for table in (experts.down, experts.up))
            active = found[0] * F.silu((down * inputs[0][:, :, None]).sum(-1))
            return output - (active[..., None] * up).sum(-2)

        route = layer.experts.route
        return layer.experts.register_forward_hook(of_experts)

    def of_heads(projection, inputs):
        parts = inputs[0].unflatten(-1, (lm.config.n_heads, -1)).clone()
        parts[:, :, int(head)] = 0
        return (parts.flatten(-2),)

    return layer.out_proj.register_forward_pre_hook(of_heads)


def test_what_is_taken_away_is_gone_and_layers_predict_as_in_the_package(browser, with_model):
    """Every layer, and every head of it; and what the stream would predict after each layer."""
    with chrome.visit(browser, (with_model / "cheems.html").as_uri()) as page:
        data, streams = page.evaluate("CHEEMS"), []
        lm = model_of(data)
        for block in lm.blocks:
            block.register_forward_hook(lambda block, x, y: streams.append(y))
        page.locator("#text").fill("a [b")
        for away in page.locator("#without option").evaluate_all("all => all.map(o => o.value)"):
            page.locator("#without").select_option(away)
            hook = without(lm, away) if away else None
            streams.clear()
            logits, _ = lm(text.text_to_ids("a [b")[None])
            after = [y[0] if isinstance(y, tuple) else y for y in streams]
            expected = [lm.norm(y[0, -1]) @ lm.embedding.weight.T for y in after]
            found = "[tokens.map(t => t.logits), tokens.at(-1).stream.map(predict)]"
            mine = [torch.tensor(part).double() for part in page.evaluate(found)]
            assert (mine[0] - logits[0]).abs().max() < 1e-5, away
            assert (mine[1] - torch.stack(expected)).abs().max() < 1e-5, away
            assert page.locator("#next .whole").count() == (8 if away else 0)
            if hook:
                hook.remove()


def test_a_cheems_names_its_cells_and_keeps_its_columns(visit):
    """By mouse and by keys; a chosen byte stays under the finger, also in a long text."""
    with visit("cheems", size=chrome.PHONE) as page:
        page.locator("#text").fill(3 * "a long text (with more bytes than columns) ")
        stack, cell = page.locator("#stack"), page.locator("#cell")
        label, column = page.evaluate("[layout().label, layout().column]")
        for at in (9, 3, 12):
            first = page.evaluate("layout().first")
            stack.click(position=dict(x=label + (at + 0.5) * column, y=10))
            assert page.evaluate("[layout().first, chosen]") == [first, first + at]
        stack.click(position=dict(x=label + 12.5 * column, y=30))
        assert cell.inner_text().startswith("layer 1 (S, chapter 03), head 1: state of “")
        stack.press("ArrowLeft")
        byte = page.evaluate("cursor.byte")
        assert byte == page.evaluate("chosen") - 1 and f"byte {byte + 1}:" in cell.inner_text()
        left = page.evaluate(f"left(0, 0, chosen)[{byte}]")
        assert cell.inner_text().endswith(f"{left:.2f}")
        page.locator("#temperature").press("Home")
        share = page.evaluate("Math.max(...softmax(tokens[chosen].logits.map(x => x / 0.2)))")
        shown = page.locator("#next li").first.inner_text()
        assert f"{100 * share:.1f} %" in shown and page.problems == []


def test_a_click_on_a_cell_keeps_it_and_leaves_the_chosen_byte(visit):
    with visit("cheems") as page:
        stack, cell = page.locator("#stack"), page.locator("#cell")
        label, column = page.evaluate("[layout().label, layout().column]")
        chosen, rows = page.evaluate("[chosen, drawnRows.map(row => row.values)]")
        x, y = label + 5.5 * column, page.evaluate("drawnRows[3].y") + 5
        stack.click(position=dict(x=x, y=y))
        kept = cell.inner_text()
        assert "byte 6:" in kept and kept.endswith(f"{rows[3][5]:.2f}")
        stack.hover(position=dict(x=x + 2 * column, y=y))
        assert "byte 8:" in cell.inner_text()
        page.locator("h1").hover()
        assert cell.inner_text() == kept
        assert page.evaluate("[chosen, drawnRows.map(row => row.values)]") == [chosen, rows]
        stack.click(position=dict(x=x + 4 * column, y=10))
        assert page.evaluate("chosen") == 9 != chosen and page.problems == []


def test_a_row_takes_its_head_away_and_brings_it_back(visit):
    """By a click on its name and by Enter; rows are numbered as in the list of heads."""
    with visit("cheems") as page:
        stack, away = page.locator("#stack"), page.locator("#without")
        names = stack.locator(".number").all_text_contents()
        assert names == [f"head {h}" for _ in range(5) for h in (1, 2, 3, 4)]
        letters = stack.locator(".letter").all_text_contents()
        assert letters == [f"{i} {x}" for i, x in enumerate(page.evaluate("config.pattern"), 1)]
        row = page.evaluate(
            "drawnRows.findIndex(r => r.layer === 6 && r.head === 3 && r.what === 'attention')"
        )
        place = dict(x=125, y=page.evaluate(f"drawnRows[{row}].y") + 5)
        stack.click(position=place)
        assert away.input_value() == "6.3" and page.locator("#next .whole").count() == 8
        assert page.locator("#cell").inner_text() == "layer 7 (I, chapter 05), head 4: taken away"
        gone, words = stack.locator(".gone"), stack.get_by_text("taken away").all_text_contents()
        assert gone.all_text_contents() == ["head 4"] * 2  # of attention and mask
        assert words == ["head taken away"] * 2
        line = "one => getComputedStyle(one).textDecorationLine"
        assert gone.first.evaluate(line) == "line-through"
        stack.press("ArrowLeft")
        stack.press("Enter")
        assert away.input_value() == "" and page.locator("#next .whole").count() == 0
        away.select_option("7")
        assert gone.all_text_contents() == ["8 E"]
        assert stack.get_by_text("taken away").all_text_contents() == ["layer taken away"]
        away.select_option("7.0")  # the row of an E is that of all its heads
        assert gone.count() == stack.get_by_text("taken away").count() == 0
        assert page.problems == []


def test_heads_are_high_enough_for_a_finger(browser, folder):
    """Each row 20 pixels, and a tap on the name of one takes its head away."""
    with browser.new_context(
        viewport=dict(width=390, height=844), has_touch=True, is_mobile=True
    ) as context:
        page = context.new_page()
        page.goto((folder / "cheems.html").as_uri())
        ys = page.evaluate("drawnRows.map(row => row.y)")
        assert min(b - a for a, b in pairwise(ys)) >= 20
        page.locator("#stack").tap(position=dict(x=30, y=ys[2] + 18))
        assert page.locator("#without").input_value() == "0.2"


def test_a_later_layer_makes_it_less_sure(visit):
    """The page's last question: layer 8, of the bracket that it opens with, and not of a quote."""
    share = "Math.max(...softmax(tokens.at(-1).logits))"
    with visit("cheems") as page:
        for opening, harms in (("[", True), ('"', False)):
            page.locator("#without").select_option("")
            page.locator("#text").fill(f"The value of the list {opening}x, y, z")
            after = page.evaluate("tokens.at(-1).stream.map(x => Math.max(...softmax(predict(x))))")
            page.locator("#without").select_option("7")
            without_8 = page.evaluate(share)
            assert (without_8 > after[7] + 0.05) == (after[6] > after[7] + 0.05) == harms


def test_the_box_grows_with_the_text_and_shows_its_end(visit):
    with visit("cheems") as page:
        box = page.locator("#text")
        low = box.evaluate("one => one.clientHeight")
        box.fill("one\ntwo\nthree\nfour\nfi")
        assert box.evaluate("one => one.clientHeight") > low + 40
        assert box.evaluate("one => one.scrollHeight - one.clientHeight") == 0
        box.fill(30 * "line\n")
        box.evaluate("one => { one.scrollTop = 0; }")
        page.locator("#next button:enabled").first.click()
        seen = "one => one.scrollTop + one.clientHeight - one.scrollHeight"
        assert abs(box.evaluate(seen)) < 2 and box.evaluate("one => one.clientHeight") < 200


@pytest.mark.parametrize("size", [chrome.DESKTOP, chrome.PHONE], ids=["desk", "phone"])
def test_a_long_text_says_what_is_left_out_and_each_layer_its_prediction(visit, size):
    with visit("cheems", size=size) as page:
        page.locator("#text").fill(4 * "a long text (with more bytes than columns) ")
        said = page.locator("#stack").inner_html()
        assert f"… {page.evaluate('layout().first')}" in said
        share = (
            "tokens[chosen].stream.map(x => (100 * Math.max(...softmax(predict(x)))).toFixed(0))"
        )
        shown = page.locator("#stack .lens:not(.byte)").all_text_contents()
        assert [text.removesuffix(" %") for text in shown] == page.evaluate(share)
        assert page.locator("#press").is_visible() == (size == chrome.DESKTOP)
        page.locator("#text").fill("")
        assert page.locator("#press").is_hidden() and page.problems == []


def test_a_cheems_is_led_by_the_keyboard_and_writes(visit):
    with visit("cheems", size=chrome.PHONE) as page:
        page.locator("#next button").first.press("Enter")
        assert page.locator("#text").input_value().endswith("z]")  # the bracket is closed
        page.locator("#chosen").press("Home")
        assert page.locator("#which").inner_text() == "“T”, 1 of 31"
        page.locator("#write").press("Enter")
        page.wait_for_function("tokens.length > 34")
        page.locator("#write").press("Enter")
        more = "new Promise(end => { const n = chosen; setTimeout(() => end(chosen - n), 200); })"
        assert page.evaluate(more) == 0 and page.problems == []  # it has stopped
