"""A right function for each task of the kind "code": what its checks must accept."""

from __future__ import annotations

SOLUTIONS = {
    "is_even": "def is_even(n):\n    return n % 2 == 0\n",
    "largest": "def largest(numbers):\n    return max(numbers)\n",
    "count_vowels": "def count_vowels(text):\n    return sum(each in 'aeiou' for each in text.lower())\n",
    "reverse_words": "def reverse_words(sentence):\n    return ' '.join(reversed(sentence.split()))\n",
    "factorial": "import math\ndef factorial(n):\n    return math.factorial(n)\n",
    "is_palindrome": "def is_palindrome(text):\n    t = text.lower().replace(' ', '')\n    return t == t[::-1]\n",
    "fibonacci": (
        "def fibonacci(n):\n    found = [0, 1]\n    while len(found) < n:\n"
        "        found.append(found[-1] + found[-2])\n    return found[:n]\n"
    ),
    "sum_of_digits": "def sum_of_digits(n):\n    return sum(int(each) for each in str(n))\n",
    "unique": "def unique(items):\n    return list(dict.fromkeys(items))\n",
    "is_prime": "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))\n",
    "gcd": "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
    "celsius": "def celsius(fahrenheit):\n    return (fahrenheit - 32) * 5 / 9\n",
    "word_counts": "from collections import Counter\ndef word_counts(text):\n    return Counter(text.split())\n",
    "flatten": "def flatten(lists):\n    return [each for one in lists for each in one]\n",
    "second_largest": "def second_largest(numbers):\n    return sorted(set(numbers))[-2]\n",
    "is_anagram": "def is_anagram(a, b):\n    return sorted(a.lower()) == sorted(b.lower())\n",
    "binary": "def binary(n):\n    return f'{n:b}'\n",
    "running_total": "import itertools\ndef running_total(numbers):\n    return list(itertools.accumulate(numbers))\n",
    "chunks": "def chunks(items, size):\n    return [items[at:at + size] for at in range(0, len(items), size)]\n",
    "caesar": (
        "def caesar(text, shift):\n    return ''.join(chr((ord(each) - 97 + shift) % 26 + 97)"
        " if 'a' <= each <= 'z' else each for each in text)\n"
    ),
    "title_case": "def title_case(text):\n    return ' '.join(each.capitalize() for each in text.split(' '))\n",
    "merge_sorted": "def merge_sorted(a, b):\n    return sorted(a + b)\n",
    "common": "def common(a, b):\n    return sorted(set(a) & set(b))\n",
    "transpose": "def transpose(matrix):\n    return list(zip(*matrix))\n",
    "leap_year": "def leap_year(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
    "balanced": (
        "def balanced(text):\n    pairs, stack = {')': '(', ']': '[', '}': '{'}, []\n    for each in text:\n"
        "        if each in '([{':\n            stack.append(each)\n"
        "        elif each in pairs and (not stack or stack.pop() != pairs[each]):\n            return False\n"
        "    return not stack\n"
    ),
    "roman": (
        "def roman(n):\n    out = ''\n    for value, mark in ((1000, 'M'), (900, 'CM'), (500, 'D'), (400, 'CD'),"
        " (100, 'C'), (90, 'XC'), (50, 'L'), (40, 'XL'), (10, 'X'), (9, 'IX'), (5, 'V'), (4, 'IV'), (1, 'I')):\n"
        "        out, n = out + mark * (n // value), n % value\n    return out\n"
    ),
    "longest_word": "def longest_word(sentence):\n    return max(sentence.split(), key=len)\n",
    "mean": "def mean(numbers):\n    return sum(numbers) / len(numbers) if numbers else 0\n",
    "median": "import statistics\ndef median(numbers):\n    return statistics.median(numbers)\n",
    "rotate": "def rotate(items, k):\n    k %= len(items)\n    return items[-k:] + items[:-k] if k else items\n",
    "divisors": "def divisors(n):\n    return [d for d in range(1, n + 1) if n % d == 0]\n",
    "run_lengths": (
        "from itertools import groupby\ndef run_lengths(text):\n"
        "    return [(key, len(list(run))) for key, run in groupby(text)]\n"
    ),
    "to_seconds": (
        "def to_seconds(clock):\n    h, m, s = map(int, clock.split(':'))\n    return 3600 * h + 60 * m + s\n"
    ),
    "remove_vowels": "def remove_vowels(text):\n    return ''.join(c for c in text if c not in 'aeiouAEIOU')\n",
    "power_of_two": "def power_of_two(n):\n    return n > 0 and n & (n - 1) == 0\n",
    "two_sum": (
        "def two_sum(numbers, target):\n    for j, b in enumerate(numbers):\n        for i in range(j):\n"
        "            if numbers[i] + b == target:\n                return i, j\n"
    ),
    "invert": "def invert(mapping):\n    return {value: key for key, value in mapping.items()}\n",
    "find": (
        "from bisect import bisect_left\ndef find(items, value):\n    at = bisect_left(items, value)\n"
        "    return at if at < len(items) and items[at] == value else -1\n"
    ),
    "collatz": (
        "def collatz(n):\n    steps = 0\n    while n != 1:\n        n = n // 2 if n % 2 == 0 else 3 * n + 1\n"
        "        steps += 1\n    return steps\n"
    ),
}
