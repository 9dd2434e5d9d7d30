"""Chapter 1: whatever q the guesses come from, what `verify_one` emits follows p.

Every uniform number is replaced by the midpoints of a grid on whose lines all borders between
outcomes lie, so that sums over the grid are the exact probabilities.
"""

from itertools import product

from minitri.core.decoding.reference import Probs, sample_one, verify_one

P = (0.4, 0.3, 0.2, 0.1)
"""The verifier's distribution of the next token."""
Q = (0.2, 0.2, 0.2, 0.4)
"""The proposer's: it guesses token 3 far too often."""
AFTER = (0.25, 0.25, 0.25, 0.25)
"""The verifier's distribution of the token after an accepted guess."""


def midpoints(count: int) -> list[float]:
    """Numbers in the middles of `count` equal parts of [0, 1)."""
    return [(i + 0.5) / count for i in range(count)]


def outcomes(q: Probs) -> list[tuple[int, bool, float]]:
    """Every outcome for one guess: the first token, whether the guess was accepted, the odds."""
    numbers = [midpoints(count) for count in (10, 12, 12)]
    found = []
    for drawing, testing, last in product(*numbers):
        guess = sample_one(q, drawing)
        tokens = verify_one([guess], [q], [P, AFTER], [testing, last])
        found.append((tokens[0], len(tokens) == 2, 1 / 1440))
    return found


def main() -> None:
    """Prints where each token comes from, and what a wrong rule would emit."""
    found = outcomes(Q)
    accepted = sum(odds for _, was_accepted, odds in found if was_accepted)
    print("token     p     q  accepted  recovered  emitted  recovered from p")
    distance = 0.0
    for token in range(4):
        kept = sum(odds for first, good, odds in found if first == token and good)
        recovered = sum(odds for first, good, odds in found if first == token and not good)
        wrong = kept + (1 - accepted) * P[token]
        distance += abs(wrong - P[token]) / 2
        print(
            f"{token:5} {P[token]:5.2f} {Q[token]:5.2f} {kept:9.2f} {recovered:10.2f}"
            f" {kept + recovered:8.2f} {wrong:17.2f}"
        )
    print(f"accepted guesses: {accepted:.2f}; 1 - TV(p, q): {sum(map(min, P, Q)):.2f}")
    print(f"recovered from p, the first token is off by a total variation of {distance:.2f}")


if __name__ == "__main__":
    main()
