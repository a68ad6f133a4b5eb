"""Gold data: trees and pronouns are read as they are meant, or refused with the number of the line."""

import pytest

from hand_made import GOLD, tokenizer
from hf_fullpay.diagnosis.coreference import read_gap
from hf_fullpay.diagnosis.spans import cut
from hf_fullpay.diagnosis.treebank import ROOT, read_treebank

TREE = """# sent_id = 1
# text = I don't see du pain.
1\tI\ti\tPRON\t_\t_\t4\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\t_\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\t_\t_\t4\tadvmod\t_\t_
4\tsee\tsee\tVERB\t_\t_\t0\troot\t_\t_
4.1\tunsaid\tunsaid\tVERB\t_\t_\t_\t_\t4:x\t_
5-6\tdu\t_\t_\t_\t_\t_\t_\t_\t_
5\tde\tde\tADP\t_\t_\t7\tcase\t_\t_
6\tle\tle\tDET\t_\t_\t7\tdet\t_\t_
7\tpain\tpain\tNOUN\t_\t_\t4\tobj\t_\tSpaceAfter=No
8\t.\t.\tPUNCT\t_\t_\t4\tpunct\t_\t_

# only a comment

1\tYes\tyes\tINTJ\t_\t_\t0\troot\t_\t_
"""


def written(tmp_path, text):
    path = tmp_path / "data"
    path.write_text(text)
    return path


def test_trees(tmp_path):
    sentence, last = read_treebank(written(tmp_path, TREE))
    assert sentence.text == "I don't see du pain."
    assert [sentence.text[a:b] for a, b in sentence.words] == ["I", "do", "n't", "see", "du", "du", "pain", "."]
    assert sentence.governors == [3, 3, 3, ROOT, 6, 6, 3, 3]
    assert sentence.relations == ["nsubj", "aux", "advmod", "root", "case", "det", "obj", "punct"]
    assert (last.text, last.words, last.governors) == ("Yes", [(0, 3)], [ROOT])


def test_gold_treebank_is_read_whole():
    """Texts are those that the treebank writes beside its words, but for runs of spaces."""
    path = GOLD / "en_ewt-ud-test.conllu"
    sentences = read_treebank(path)
    written = [line[9:].rstrip("\n") for line in path.open(encoding="utf-8") if line.startswith("# text = ")]
    assert len(sentences) == len(written) == 2077
    assert all(" ".join(s.text.split()) == " ".join(text.split()) for s, text in zip(sentences, written, strict=True))


@pytest.mark.parametrize(("old", "new", "told"), [
    ("1\tI\ti", "1\tI", r"line 3: expected 10 columns split by tabs"),
    ("3\tn't", "9\tn't", r"line 6: expected word 3, got '9'"),
    ("7\tpain\tpain\tNOUN\t_\t_\t4", "7\tpain\tpain\tNOUN\t_\t_\t14", r"line 12: expected a head among the 8 words, got 14"),
    ("7\tpain\tpain\tNOUN\t_\t_\t4", "7\tpain\tpain\tNOUN\t_\t_\tfour", r"line 12: expected an integer, got 'four'"),
    ("2-3\tdon't", "2-30\tdon't", r"line 13: expected all words of the token"),
], ids=["columns", "order", "head", "number", "token"])  # fmt: skip
def test_broken_trees(tmp_path, old, new, told):
    assert old in TREE
    with pytest.raises(ValueError, match=told):
        read_treebank(written(tmp_path, TREE.replace(old, new)))


def test_no_trees(tmp_path):
    with pytest.raises(ValueError, match="expected sentences in CoNLL-U, got none"):
        read_treebank(written(tmp_path, "# nothing\n"))


HEADER = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"
ROW = '1\tAnn saw "Bob", who left her.\ther\t24\tAnn\t0\tTRUE\tBob\t9\tFALSE\tu\n'


def test_pronouns(tmp_path):
    neither = ROW.replace("TRUE", "FALSE")
    (case,) = read_gap(written(tmp_path, HEADER + neither + ROW))
    assert [case.text[a:b] for a, b in case.spans] == ["her", "Ann", "Bob"]
    assert case.answer == 0
    assert len(read_gap(GOLD / "gap-development.tsv")) == 1799


@pytest.mark.parametrize(("text", "told"), [
    (HEADER.replace("A-coref", "A-gold") + ROW, r"\['A-coref'\] are missing"),
    (HEADER + ROW.replace("\t9\t", "\t8\t"), r"line 2: expected B at its offset in the text, got 'Bob at 8'"),
    (HEADER + ROW.replace("FALSE", "no"), r"line 2: expected TRUE or FALSE, got 'no'"),
    (HEADER + "1\tAnn\n", r"line 2: expected Pronoun at its offset"),
    (HEADER, "expected cases with one right candidate, got none"),
], ids=["columns", "offset", "truth", "short", "empty"])  # fmt: skip
def test_broken_pronouns(tmp_path, text, told):
    with pytest.raises(ValueError, match=told):
        read_gap(written(tmp_path, text))


def test_words_and_pieces():
    """A piece goes to the word that it shares most with; marks and pieces between words go to none."""
    text = "she don't runs"
    pieces = cut(tokenizer(["she", "don", "run", "##s", "'", "t"]), text, [(0, 3), (4, 6), (6, 9), (10, 14)])
    #                 [CLS] she don ' t run ##s [SEP]
    assert pieces.owners == [-1, 0, 1, 2, 2, 3, 3, -1]
    assert pieces.marks == [True, *[False] * 6, True]
    assert pieces.spans == 4
    assert cut(tokenizer(["she"]), "she", [(0, 3), (0, 3)]).owners == [-1, 0, -1]


def test_slow_tokenizers_are_refused():
    with pytest.raises(ValueError, match="tokenizer: expected a fast one"):
        cut(object(), "text")
