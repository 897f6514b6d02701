"""lever.py NAME OUTDIR [--set k=v ...]: convert, calibrate, train, score. Base recipe /tmp/code/base.yaml."""
import argparse, json, random, sys, time, os
from pathlib import Path
t0 = time.time()
p = argparse.ArgumentParser(); p.add_argument("name"); p.add_argument("out", type=Path); p.add_argument("--recipe", default="/tmp/code/base.yaml")
p.add_argument("--set", action="append", default=[]); p.add_argument("--work", type=Path, default=Path("/tmp/work")); p.add_argument("--samples", type=int, default=50)
p.add_argument("--lengths", default="512,1024,2048,4096"); p.add_argument("--books", default="/tmp/data/classic-books/valid"); p.add_argument("--score-only"); p.add_argument("--start")
a = p.parse_args()
import torch
import sse_convert
from sse_convert import api
from sse_convert.recipe import load_recipe
from sse_convert.training.stage import run_stage
from transformers import AutoModelForCausalLM, AutoTokenizer

WORDS = "amber anchor basket beacon bishop blossom bridge candle canyon carpet castle cherry circle copper corner cotton cradle dragon emerald falcon feather fiddle forest garden ginger guitar hammer harbor helmet island jacket jungle kettle ladder lantern lemon lizard magnet marble meadow mirror monkey needle oyster palace parrot pepper pillow planet pocket puzzle rabbit ribbon rocket saddle salmon shadow silver spider stable summit sunset temple thunder tiger tunnel turtle velvet violin walnut window winter".split()
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
PRE = "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you about the numbers afterwards.\n"

def score(folder, device, teacher=None, lengths=None, samples=50, kl=True, teacher_path=None):
    tok = AutoTokenizer.from_pretrained(folder)
    m = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if device == "cuda" else torch.float32).to(device).eval()
    enc = lambda s: tok(s, add_special_tokens=False)["input_ids"]
    files = sorted(Path(a.books).iterdir())
    text = [enc(f.read_text(encoding="utf8")[:400_000]) for f in files]
    book, noise = [t for x in text for t in x], enc(NOISE)
    def row(task, L, r):
        n = 4 if task == "multi4" else 1
        keys = r.sample(WORDS, n); vals = [str(r.randint(1000000, 9999999)) for _ in keys]
        needles = [enc(f" One of the special magic numbers for {k} is: {v}.") for k, v in zip(keys, vals)]; q = r.randrange(n)
        tail = enc(f"\nWhat is the special magic number for {keys[q]} mentioned in the provided text? The special magic number for {keys[q]} mentioned in the provided text is"); ans = enc(" " + vals[q])
        head = enc(PRE); room = L - len(head) - len(tail) - len(ans) - sum(map(len, needles))
        if task == "noise": body = (noise * (room // len(noise) + 1))[:room]
        else: s = r.randrange(len(book) - room); body = book[s:s + room]
        cuts = sorted(r.randrange(room) for _ in needles); out, last = [], 0
        for c, nd in zip(cuts, needles): out += body[last:c] + nd; last = c
        return head + out + body[last:] + tail + ans, len(ans), room - cuts[0]
    res = {}
    with torch.inference_mode():
        for L in lengths:
            for task in ("noise", "book", "multi4"):
                r = random.Random(f"{task}{L}"); ok, nll, first = [], [], []
                rows = [row(task, L, r) for _ in range(samples)]; b = max(1, 32768 // L)
                for i in range(0, samples, b):
                    part = rows[i:i + b]; x = torch.tensor([s for s, *_ in part], device=device); n = part[0][1]
                    if any(k != n for _, k, _ in part): raise SystemExit("answers of different length")
                    lp = m(input_ids=x, use_cache=False, logits_to_keep=n + 1).logits[:, :-1].float().log_softmax(-1)
                    t = x[:, -n:]; got = lp.argmax(-1) == t
                    ok += got.all(1).tolist(); first += got.float().mean(1).tolist(); nll += (-lp.gather(-1, t[..., None])[..., 0].mean(1)).tolist()
                res[f"{task}@{L}"] = [round(sum(ok) / samples, 3), round(sum(first) / samples, 3), round(sum(nll) / samples, 3)]
        if kl and teacher_path:
            t = AutoModelForCausalLM.from_pretrained(teacher_path, dtype=torch.bfloat16 if device == "cuda" else torch.float32).to(device).eval()
            for L in (2048,):
                tot = n = ls = lt = 0.0
                chunks = [x[i:i + L] for x in text for i in range(2000, len(x) - L, L)][: 49152 // L * 2]
                for i in range(0, len(chunks), 4):
                    x = torch.tensor(chunks[i:i + 4], device=device)
                    a_, b_ = (z(input_ids=x, use_cache=False).logits.float().log_softmax(-1) for z in (t, m))
                    tot += (a_.exp() * (a_ - b_)).sum(-1)[:, :-1].sum().item(); n += x[:, 1:].numel()
                    lt -= a_[:, :-1].gather(-1, x[:, 1:, None]).sum().item(); ls -= b_[:, :-1].gather(-1, x[:, 1:, None]).sum().item()
                res[f"kl@{L}"] = round(tot / n, 4); res[f"gap@{L}"] = round((ls - lt) / n, 4); res["teacher_loss"] = round(lt / n, 4)
    return res

device = "cuda" if torch.cuda.is_available() else "cpu"
lengths = [int(x) for x in a.lengths.split(",")]
a.out.mkdir(parents=True, exist_ok=True)
recipe = load_recipe(a.recipe, a.set)
times = {"import": time.time() - t0}
folder = a.work / a.name
if a.score_only:
    last = Path(a.score_only)
else:
    folder.mkdir(parents=True, exist_ok=True)
    last = Path(a.start) if a.start else folder / "converted"
    if not a.start:
        if not last.exists(): api.convert(recipe, out=last)
        if recipe.calibrate.enabled:
            if not (folder / "calibrated").exists(): api.calibrate(recipe, last, out=folder / "calibrated")
            last = folder / "calibrated"
    times["calibrated"] = time.time() - t0
    for stage in recipe.stages:
        rep = run_stage(recipe, stage, last, folder / stage.name); last = folder / stage.name
        times[stage.name] = time.time() - t0; times[stage.name + "_steps_s"] = rep.seconds
        print(a.name, stage.name, rep.loss_first, rep.loss_last, rep.steps, round(rep.seconds), flush=True)
        times[stage.name + "_loss"] = [rep.loss_first, rep.loss_last, rep.steps, rep.tokens]
res = score(last, device, lengths=lengths, samples=a.samples, teacher_path=recipe.model)
times["end"] = time.time() - t0
json.dump({"name": a.name, "set": a.set, "times": {k: (round(v, 1) if isinstance(v, float) else v) for k, v in times.items()}, "score": res}, open(a.out / f"{a.name}.json", "w"))
print("RESULT", a.name, json.dumps(res), {k: v for k, v in times.items()}, flush=True)
