"""Chapter 1: whatever q the guesses come from, what `verify_one` emits follows p."""

from collections import Counter
from itertools import product

from minitri.core.decoding.reference import sample_one, verify_one

P = (0.4, 0.3, 0.2, 0.1)  # the verifier's distribution of the next token
Q = (0.2, 0.2, 0.2, 0.4)  # the proposer's: it guesses token 3 far too often
AFTER = (0.25, 0.25, 0.25, 0.25)  # the verifier's after an accepted guess
# Midpoints of cells on whose borders outcomes change: so sums over them are exact probabilities.
GRID = [[(i + 0.5) / count for i in range(count)] for count in (10, 12, 12)]


if __name__ == "__main__":
    accepted, recovered = Counter[int](), Counter[int]()
    for drawing, testing, last in product(*GRID):
        guess = sample_one(Q, drawing)
        tokens = verify_one([guess], [Q], [P, AFTER], [testing, last])
        (accepted if len(tokens) == 2 else recovered)[tokens[0]] += 1
    print("token     p     q  accepted  recovered  emitted  recovered from p")
    distance, total = 0.0, 10 * 12 * 12
    share = accepted.total() / total
    for token, p in enumerate(P):
        kept, new = accepted[token] / total, recovered[token] / total
        wrong = kept + (1 - share) * p
        distance += abs(wrong - p) / 2
        numbers = f"{kept:9.2f} {new:10.2f} {kept + new:8.2f} {wrong:17.2f}"
        print(f"{token:5} {p:5.2f} {Q[token]:5.2f} {numbers}")
    print(f"accepted guesses: {share:.2f}; 1 - TV(p, q): {sum(map(min, P, Q)):.2f}")
    print(f"recovered from p, the first token is off by a total variation of {distance:.2f}")
