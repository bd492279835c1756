// Tests of byte automata. Some tests compare the automaton of a random expression with a list of
// all short texts of the expression. Other tests check that automata are minimal and that limits
// work.
//
// The library does not export the tested classes, so this program is compiled with the library's
// sources. Prints "N passed, N failed". The exit status is 1 if a check failed.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "compile/automata/automata.h"
#include "tests.h"

namespace {

using namespace dlm::compile;

int passed = 0, failed = 0;

void check(bool holds, int line, const char* what) {
  ++(holds ? passed : failed);
  if (!holds) std::printf("compile_automaton_test.cc:%d: failed: %s\n", line, what);
}
#define CHECK(condition) check((condition), __LINE__, #condition)

constexpr size_t kLongest = 6;  // length in bytes of the longest tested texts; each byte is a or b
using Texts = std::set<std::string>;

Texts joined(const Texts& first, const Texts& second) {
  Texts out;
  for (const std::string& a : first)
    for (const std::string& b : second)
      if (a.size() + b.size() <= kLongest) out.insert(a + b);
  return out;
}

// Makes random expressions, and lists all their texts of at most kLongest bytes.
class Random {
 public:
  Random(Expressions& expressions, std::mt19937& random)
      : expressions_(expressions), random_(random) {}

  std::pair<Node, Texts> make(int depth) {
    switch (below(depth > 0 ? 11 : 4)) {
      case 0:
        return {expressions_.bytes("a"), {"a"}};
      case 1:
        return {expressions_.bytes("ba"), {"ba"}};
      case 2:
        return {expressions_.set(ByteSet{}.set('a').set('b')), {"a", "b"}};
      case 3:
        return below(4) == 0 ? std::pair{expressions_.nothing(), Texts{}}
                             : std::pair{expressions_.empty(), Texts{""}};
      case 4:
      case 5: {
        const auto [a, of_a] = make(depth - 1);
        const auto [b, of_b] = make(depth - 1);
        return {expressions_.sequence(a, b), joined(of_a, of_b)};
      }
      case 6:
      case 7: {
        std::vector<Node> choices;
        Texts all;
        for (int i = below(4); i >= 0; --i) {
          const auto [each, texts] = make(depth - 1);
          choices.push_back(each);
          all.insert(texts.begin(), texts.end());
        }
        return {expressions_.either(choices), all};
      }
      case 8: {
        const auto [part, texts] = make(depth - 1);
        const auto low = static_cast<uint32_t>(below(4));
        const uint32_t high = below(3) == 0 ? kUnbounded : low + static_cast<uint32_t>(below(4));
        Texts all, now{""};
        for (uint32_t i = 0; i <= low + kLongest && i <= high; ++i) {
          if (i >= low) all.insert(now.begin(), now.end());
          now = joined(now, texts);
        }
        return {expressions_.repeat(part, low, high), all};
      }
      default: {
        const auto [a, of_a] = make(depth - 1);
        const auto [b, of_b] = make(depth - 1);
        const bool is_both = below(2) == 0;
        Texts all;
        for (const std::string& text : of_a)
          if ((of_b.count(text) > 0) == is_both) all.insert(text);
        return {is_both ? expressions_.both(a, b) : expressions_.without(a, b), all};
      }
    }
  }

 private:
  int below(int limit) { return static_cast<int>(random_() % static_cast<unsigned>(limit)); }

  Expressions& expressions_;
  std::mt19937& random_;
};

// Returns true if every state accepts at least one text, and no two states accept the same texts.
bool is_minimal(const ByteAutomaton& automaton) {
  const size_t states = automaton.states();
  std::vector<int> parts(states);
  for (size_t state = 0; state < states; ++state) parts[state] = automaton.accepting[state];
  size_t count = 0;
  while (true) {
    std::map<std::vector<int>, int> numbers;
    std::vector<int> next(states);
    for (size_t state = 0; state < states; ++state) {
      std::vector<int> key{parts[state]};
      for (int byte = 0; byte < 256; ++byte) {
        const int32_t to = automaton.next(static_cast<int32_t>(state), static_cast<uint8_t>(byte));
        key.push_back(to < 0 ? -1 : parts[static_cast<size_t>(to)]);
      }
      next[state] = numbers.try_emplace(key, static_cast<int>(numbers.size())).first->second;
    }
    parts = next;
    if (numbers.size() == count) break;
    count = numbers.size();
  }
  std::vector<uint8_t> is_alive = automaton.accepting;
  for (size_t round = 0; round < states; ++round)
    for (size_t state = 0; state < states; ++state)
      for (uint32_t i = automaton.starts[state]; i < automaton.starts[state + 1]; ++i)
        if (is_alive[static_cast<size_t>(automaton.edges[i].state)]) is_alive[state] = 1;
  for (const uint8_t each : is_alive)
    if (!each) return false;
  return count == states;
}

void test_random_expressions(std::mt19937& random, int rounds) {
  Texts all{""};
  for (size_t i = 0; i < kLongest; ++i) {
    const Texts longer = joined(all, {"a", "b"});
    all.insert(longer.begin(), longer.end());
  }
  for (int round = 0; round < rounds; ++round) {
    Budget budget(Limits{});
    Expressions expressions(budget);
    const auto [node, texts] = Random(expressions, random).make(4);
    Automata automata(expressions);
    const ByteAutomaton& made = automata.of(node);
    bool is_equal = true;
    for (const std::string& text : all) is_equal &= made.matches(text) == (texts.count(text) > 0);
    CHECK(is_equal);
    CHECK(is_minimal(made));
    CHECK(expressions.is_nullable(node) == made.matches(""));
    // Converting the automaton to an expression and back must give an equal automaton.
    if (!made.is_empty()) {
      const Node machine = expressions.machine(made);
      CHECK(automata.is_empty(expressions.without(node, machine)));
      CHECK(automata.is_empty(expressions.without(machine, node)));
      const ByteAutomaton& twice = automata.of(expressions.sequence(machine, machine));
      CHECK(twice.matches("") == (texts.count("") > 0));
      const Texts doubled = joined(texts, texts);
      is_equal = true;
      for (const std::string& text : all)
        is_equal &= twice.matches(text) == (doubled.count(text) > 0);
      CHECK(is_equal);
    }
  }
}

std::string utf8(char32_t point) {
  std::string out;
  const auto put = [&](char32_t byte) { out += static_cast<char>(byte); };
  if (point < 0x80) {
    put(point);
  } else if (point < 0x800) {
    put(0xC0 | point >> 6), put(0x80 | (point & 0x3F));
  } else if (point < 0x10000) {
    put(0xE0 | point >> 12), put(0x80 | (point >> 6 & 0x3F)), put(0x80 | (point & 0x3F));
  } else {
    put(0xF0 | point >> 18), put(0x80 | (point >> 12 & 0x3F));
    put(0x80 | (point >> 6 & 0x3F)), put(0x80 | (point & 0x3F));
  }
  return out;
}

void test_characters(std::mt19937& random) {
  for (int round = 0; round < 12; ++round) {
    CodePoints ranges;
    for (size_t i = random() % 6; i-- > 0;) {
      const auto low = static_cast<char32_t>(random() % (0x110000 >> random() % 16));
      ranges.push_back({low, std::min<char32_t>(0x10FFFF, low + random() % (1 << random() % 20))});
    }
    if (round == 0) ranges = {{0, 0x10FFFF}};
    if (round == 1) ranges = {{0xD800, 0xDFFF}};
    ranges = normalised(ranges);
    const CodePoints others = complement(ranges);
    Budget budget(Limits{});
    Expressions expressions(budget);
    Automata automata(expressions);
    const ByteAutomaton& made = automata.of(expressions.characters(ranges));
    const ByteAutomaton& rest = automata.of(expressions.characters(others));
    CHECK(is_minimal(made));
    std::vector<char32_t> points;
    for (const auto& [low, high] : ranges)
      for (const uint32_t each : {low - 1u, low + 0u, high + 0u, high + 1u})
        if (each < 0x110000) points.push_back(each);
    for (char32_t point = 0; point < 0x110000; point += 1 + random() % 100) points.push_back(point);
    bool holds = true;
    for (const char32_t point : points) {
      bool is_inside = false;
      for (const auto& [low, high] : ranges) is_inside |= low <= point && point <= high;
      const bool is_surrogate = point >= 0xD800 && point < 0xE000;
      holds &= made.matches(utf8(point)) == (is_inside && !is_surrogate);
      holds &= rest.matches(utf8(point)) == (!is_inside && !is_surrogate);
    }
    CHECK(holds);
  }
}

// Minimisation merges parts that accept the same texts, even if the parts are in cycles or are
// reached in different ways.
void test_merging() {
  Budget budget(Limits{});
  Expressions e(budget);
  Automata automata(e);
  const Node a = e.bytes("a"), b = e.bytes("b"), c = e.bytes("c");
  const Node loop = e.repeat(e.either(a, e.sequence(b, e.either(a, b))), 0, kUnbounded);
  // `unrolled` accepts the same texts as `loop`, but its expression repeats the body before the
  // loop. Followed by the same text, both must have the same number of states.
  const Node unrolled =
      e.either(e.empty(), e.sequence(e.either(a, e.sequence(b, e.either(a, b))), loop));
  const size_t plain = automata.of(e.sequence(loop, c)).states();
  CHECK(automata.of(e.sequence(unrolled, c)).states() == plain);
  CHECK(automata
            .of(e.either(e.sequence(e.bytes("ac"), e.sequence(unrolled, c)),
                         e.sequence(e.bytes("bc"), e.sequence(loop, c))))
            .states() == plain + 2);
  // Loops with different ends stay separate.
  CHECK(automata
            .of(e.either(e.sequence(e.bytes("ac"), e.sequence(loop, c)),
                         e.sequence(e.bytes("bc"), e.sequence(loop, e.bytes("cc")))))
            .states() == 2 * plain + 3);
}

template <class Make>
std::string refusal(const Limits& limits, Make make) {
  try {
    Budget budget(limits);
    Expressions expressions(budget);
    Automata automata(expressions);
    automata.of(make(expressions));
    return "";
  } catch (const dlm::Error& error) {
    return error.what();
  }
}

void test_sizes_and_limits() {
  const Limits limits;
  const auto states = [&](const std::function<Node(Expressions&)>& make) {
    Budget budget(limits);
    Expressions expressions(budget);
    return Automata(expressions).of(make(expressions)).states();
  };
  // If one repetition is directly inside another, the counts are multiplied.
  CHECK(states([](Expressions& e) { return e.repeat(e.repeat(e.bytes("a"), 1, 100), 1, 100); }) ==
        10001);
  CHECK(states([](Expressions& e) { return e.repeat(e.repeat(e.bytes("a"), 3, 4), 1, 2); }) == 9);
  // The expression is a choice of ten thousand words that end with the same optional parts.
  CHECK(states([](Expressions& e) {
          std::vector<Node> words;
          for (int i = 0; i < 10000; ++i) words.push_back(e.bytes(std::to_string(1000000 + i)));
          return e.either(words);
        }) == 8);
  CHECK(states([](Expressions& e) {
          Node tail = e.empty();
          for (int i = 0; i < 60; ++i)
            tail = e.sequence(e.optional(e.bytes("," + std::to_string(100 + i))), tail);
          return tail;
        }) < 60 * 60);
  // The nesting of this expression is too deep for recursion on the stack.
  CHECK(states([](Expressions& e) {
          Node deep = e.bytes("a");
          for (int i = 0; i < 5000; ++i)
            deep = e.either(e.sequence(deep, e.empty()), e.sequence(e.bytes("b"), deep));
          return deep;
        }) > 5000);
  CHECK(states([](Expressions& e) {
          Node all = e.repeat(e.set(ByteSet{}.set('a').set('b')), 0, kUnbounded);
          for (uint32_t i = 0; i < 3000; ++i)
            all = e.both(all, e.either(e.repeat(e.bytes("a"), i % 7, kUnbounded), e.bytes("b")));
          return all;
        }) > 1);

  const auto many_states = [](Expressions& e) { return e.repeat(e.bytes("a"), 0, 200000); };
  CHECK(refusal(limits, many_states).find("more than 131072 states") != std::string::npos);
  CHECK(refusal(limits, [](Expressions& e) {
          return e.repeat(e.bytes("a"), 4000000000u, kUnbounded);
        }).find("more than") != std::string::npos);
  // This automaton has 2^30 states, before and after minimisation.
  const auto too_many = [](Expressions& e) {
    const Node any = e.set(ByteSet{}.set('a').set('b'));
    return e.sequence(e.repeat(any, 0, kUnbounded),
                      e.sequence(e.bytes("a"), e.repeat(any, 29, 29)));
  };
  Limits little = limits;
  CHECK(refusal(little, too_many).find("states") != std::string::npos);
  little.memory_bytes = 1 << 20;
  CHECK(refusal(little, too_many).find("memory_bytes") != std::string::npos);
  little = limits;
  little.seconds = 0.05;
  little.states = size_t{1} << 40;
  CHECK(refusal(little, too_many).find("processor time") != std::string::npos);
}

void test_between() {
  Budget budget(Limits{});
  Expressions e(budget);
  Automata automata(e);
  const Node word = e.repeat(e.set(ByteSet{}.set('x').set('y').set(0)), 1, 3);
  const ByteAutomaton& texts =
      automata.of(e.sequence(e.bytes("{\xC3\xA9"), e.sequence(word, e.bytes("}"))));
  const ByteAutomaton made = between(texts, "{\xC3\xA9x", "}", "", budget);
  CHECK(made.matches("") && made.matches("xy") && !made.matches("xyx") && !made.matches("}"));
  CHECK(is_minimal(made));
  std::string nul(1, '\0');
  CHECK(!made.matches(nul) && texts.matches("{\xC3\xA9" + nul + "}"));
  const auto why = [&](const char* before, const char* behind) -> std::string {
    try {
      between(texts, before, behind, "; a hint", budget);
      return "";
    } catch (const dlm::Error& error) {
      return error.what();
    }
  };
  CHECK(
      why("{\xC3\xA8", "}") ==
      "no text of the constraint starts with \"{\\xc3\\xa8\", though some may with \"{\"; a hint");
  CHECK(why("{", "]") == "no text of the constraint starts with \"{\" and ends with \"]\"");
  CHECK(why("", "") == "");
}

}  // namespace

// The argument is the number of random expressions.
int compile_automaton_test(int count, char** arguments) {
  std::mt19937 random(11);
  test_random_expressions(random, count > 1 ? std::atoi(arguments[1]) : 2000);
  test_characters(random);
  test_merging();
  test_sizes_and_limits();
  test_between();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
