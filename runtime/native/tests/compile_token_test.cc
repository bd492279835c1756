// Tests of the token stage, which converts an automaton over bytes to an automaton over tokens. For
// random vocabularies, the tests compare the result with the texts that the tokens spell.
//
// The library does not export the tested classes, so this program is compiled with the library's
// sources. Prints "N passed, N failed". The exit status is 1 if a check failed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "compile/automata/automata.h"
#include "compile/tokens/token_automaton.h"
#include "tests.h"

namespace {

using namespace dlm::compile;

int passed = 0, failed = 0;

void check(bool holds, int line, const char* what) {
  ++(holds ? passed : failed);
  if (!holds) std::printf("compile_token_test.cc:%d: failed: %s\n", line, what);
}
#define CHECK(condition) check((condition), __LINE__, #condition)

struct Source {
  std::mt19937& random;
  int below(size_t limit) { return static_cast<int>(random() % limit); }
};

// Makes an expression of a kind that occurs in constraints: words, strings with terminators,
// counted repetitions, or lists.
Node make(Expressions& e, Source& source, int depth) {
  ByteSet inside;
  for (int byte = 0x20; byte < 0x7F; ++byte) inside.set(static_cast<size_t>(byte));
  inside.reset('"').reset('\\');
  const Node plain = e.either({e.set(inside), e.characters({{0xA0, 0xD7FF}, {0xE000, 0x10FFFF}}),
                               e.sequence(e.bytes("\\"), e.set(ByteSet{}.set('n').set('"')))});
  ByteSet letters;
  for (int byte = 'a'; byte <= 'z'; ++byte) letters.set(static_cast<size_t>(byte));
  switch (source.below(depth > 0 ? 9 : 5)) {
    case 0:
      return e.sequence({e.bytes("\""), e.repeat(plain, 0, kUnbounded), e.bytes("\"")});
    case 1: {
      const auto low = static_cast<uint32_t>(source.below(4));
      return e.sequence({e.bytes("\""),
                         e.repeat(plain, low, low + static_cast<uint32_t>(source.below(30))),
                         e.bytes("\"")});
    }
    case 2: {
      std::string word;
      for (int i = source.below(9); i >= 0; --i) word += "abn\"\xC3\xA9"[source.below(5)];
      return e.bytes(word.back() == '\xC3' ? word + "\xA9" : word);
    }
    case 3:
      return e.repeat(e.set(letters), 1, static_cast<uint32_t>(2 + source.below(20)));
    case 4:
      return e.characters({{0, 0x10FFFF}});
    case 5:
    case 6:
      return e.sequence({make(e, source, depth - 1), e.bytes(","), make(e, source, depth - 1)});
    case 7:
      return e.either(
          {make(e, source, depth - 1), make(e, source, depth - 1), make(e, source, depth - 1)});
    default:
      return e.repeat(make(e, source, depth - 1), 0,
                      source.below(2) == 0 ? kUnbounded : static_cast<uint32_t>(source.below(5)));
  }
}

std::vector<std::string> make_vocabulary(Source& source) {
  const std::vector<std::string> pieces{
      "a",  "b",   "n",   "\"",           "\\",   ",",        "\xC3\xA9", "ab", "\xC3",
      "z ", "\",", ",\"", "\xE4\xB8\xAD", "\xA9", "\xE4\xB8", "\x80",     "\n", "\\n"};
  std::vector<std::string> tokens(4);  // the end token, the mask token, and two tokens without text
  for (int i = 0; i < 120; ++i) {
    std::string text;
    for (int j = source.below(5); j >= 0; --j)
      text += pieces[static_cast<size_t>(source.below(pieces.size()))];
    tokens.push_back(text);
  }
  for (const std::string& each : pieces) tokens.push_back(each);
  return tokens;
}

// Walks both automata in parallel. In `made`, the automaton over tokens, each token must lead to
// the state that its bytes lead to in `texts`. If `is_all` is false, `made` may lack tokens that
// the tokenizer would not use.
void compare(const ByteAutomaton& texts, const dlm::Automaton& made,
             const std::vector<std::string>& tokens, const std::vector<int32_t>& ends,
             bool is_all) {
  std::map<std::pair<int32_t, int32_t>, bool> seen;
  std::vector<std::pair<int32_t, int32_t>> open{{0, 0}};
  // For each state: 1 if tokens of the vocabulary can complete a text from this state, otherwise 0.
  std::vector<uint8_t> can_end(texts.accepting);
  const auto behind = [&](int32_t state, const std::string& text) {
    for (const char byte : text)
      if (state >= 0) state = texts.next(state, static_cast<uint8_t>(byte));
    return state;
  };
  for (bool is_new = true; is_new;) {
    is_new = false;
    for (size_t state = 0; state < texts.states(); ++state)
      for (size_t token = 4; token < tokens.size() && !can_end[state]; ++token) {
        const int32_t to = behind(static_cast<int32_t>(state), tokens[token]);
        if (to >= 0 && can_end[static_cast<size_t>(to)]) can_end[state] = 1, is_new = true;
      }
  }
  bool holds = true, has_end_state = false;
  while (!open.empty()) {
    const auto [state, number] = open.back();
    open.pop_back();
    if (!seen.try_emplace({state, number}, true).second) continue;
    for (const int32_t end : ends) {
      const int32_t to = made.next(number, end);
      holds &= (to >= 0) == (texts.accepting[static_cast<size_t>(state)] != 0);
      if (to >= 0) {
        has_end_state = true;
        holds &= made.next(to, end) == to && made.distances[static_cast<size_t>(to)] == 0;
      }
    }
    holds &= (made.distances[static_cast<size_t>(number)] == 0) ==
             (texts.accepting[static_cast<size_t>(state)] != 0);
    for (size_t token = 0; token < tokens.size(); ++token) {
      if (std::find(ends.begin(), ends.end(), static_cast<int32_t>(token)) != ends.end()) continue;
      const int32_t to = tokens[token].empty() ? -1 : behind(state, tokens[token]);
      const int32_t made_to = made.next(number, static_cast<int32_t>(token));
      const bool leads_on = to >= 0 && can_end[static_cast<size_t>(to)];
      holds &= is_all ? (made_to >= 0) == leads_on : made_to < 0 || leads_on;
      if (made_to >= 0 && to >= 0) open.push_back({to, made_to});
    }
  }
  CHECK(holds);
  CHECK(has_end_state);
  std::set<int32_t> numbers;
  for (const auto& [pair, _] : seen) numbers.insert(pair.second);
  CHECK(static_cast<int32_t>(numbers.size()) + 1 == made.states);
}

// Returns true if the automaton accepts a sequence of tokens that spells the text.
bool has_text(const dlm::Automaton& made, const std::vector<std::string>& tokens,
              const std::string& text) {
  std::set<std::pair<size_t, int32_t>> seen, open{{0, 0}};
  while (!open.empty()) {
    const auto [at, state] = *open.begin();
    open.erase(open.begin());
    if (at == text.size() && made.distances[static_cast<size_t>(state)] == 0) return true;
    if (!seen.insert({at, state}).second) continue;
    for (size_t token = 0; token < tokens.size(); ++token)
      if (!tokens[token].empty() && text.compare(at, tokens[token].size(), tokens[token]) == 0)
        if (const int32_t to = made.next(state, static_cast<int32_t>(token)); to >= 0)
          open.insert({at + tokens[token].size(), to});
  }
  return false;
}

// Returns a text that the automaton accepts. The bytes of the text are drawn at random.
std::string draw(const ByteAutomaton& texts, Source& source) {
  std::string out;
  int32_t state = 0;
  while (true) {
    const auto at = static_cast<size_t>(state);
    const uint32_t count = texts.starts[at + 1] - texts.starts[at];
    if (count == 0 || (texts.accepting[at] && (out.size() > 40 || source.below(6) == 0)))
      return out;
    const ByteEdge& edge =
        texts.edges[texts.starts[at] + static_cast<uint32_t>(source.below(count))];
    out += static_cast<char>(edge.low + source.below(edge.high - edge.low + 1u));
    state = edge.state;
    if (out.size() > 400) return out;
  }
}

// Checks that the automaton is minimal: two classes never behave the same in all groups, and two
// groups are never equal.
void check_classes(const dlm::Automaton& made) {
  std::map<std::vector<int32_t>, int> groups;
  std::vector<std::vector<int32_t>> of_class(static_cast<size_t>(made.classes));
  for (int32_t group = 0; group < made.groups; ++group) {
    std::vector<int32_t> classes(
        made.group_classes.begin() + made.group_starts[static_cast<size_t>(group)],
        made.group_classes.begin() + made.group_starts[static_cast<size_t>(group) + 1]);
    CHECK(std::is_sorted(classes.begin(), classes.end()));
    for (const int32_t number : classes) of_class[static_cast<size_t>(number)].push_back(group);
    CHECK(groups.try_emplace(classes, group).second);
  }
  std::set<std::vector<int32_t>> different(of_class.begin(), of_class.end());
  CHECK(different.size() == of_class.size());
}

void test_random_automata(std::mt19937& random, int rounds) {
  Source source{random};
  int compared = 0;
  for (int round = 0; round < rounds; ++round) {
    Budget budget(Limits{});
    Expressions expressions(budget);
    Automata automata(expressions);
    const Node node = make(expressions, source, 3);
    const std::vector<std::string> tokens = make_vocabulary(source);
    const std::vector<int32_t> ends =
        source.below(2) == 0 ? std::vector<int32_t>{0} : std::vector<int32_t>{0, 7};
    const auto vocab_size = static_cast<int32_t>(tokens.size());
    const Vocabulary all(tokens, vocab_size, ends, nullptr);
    // A tokenizer that always takes the longest token.
    const Vocabulary encoded(tokens, vocab_size, ends, [&](std::string_view text) {
      int32_t best = -1;
      for (int32_t token = 4; token < vocab_size; ++token) {
        const std::string& each = tokens[static_cast<size_t>(token)];
        if (text.substr(0, each.size()) == each && (token != 7 || ends.size() < 2) &&
            (best < 0 || each.size() > tokens[static_cast<size_t>(best)].size()))
          best = token;
      }
      return best;
    });
    try {
      const ByteAutomaton& texts = automata.of(node);
      dlm::Automaton made = token_automaton(texts, all, budget);
      compare(texts, made, tokens, ends, true);
      check_classes(made);
      const dlm::Automaton shorter = token_automaton(texts, encoded, budget);
      compare(texts, shorter, tokens, ends, false);
      check_classes(shorter);
      // `shorter` must accept each text that `made` accepts.
      for (int i = 0; i < 20; ++i)
        if (const std::string text = draw(texts, source); has_text(made, tokens, text))
          CHECK(has_text(shorter, tokens, text));
      // Writing the automaton to a file and reading the file must give the same automaton.
      made.made_of = {1, 2, 3};
      const std::vector<uint8_t> file = dlm::write_automaton(made);
      const dlm::Automaton read = dlm::read_automaton(file.data(), file.size(), "test");
      CHECK(read.made_of == made.made_of && read.token_class == made.token_class &&
            read.group_classes == made.group_classes && read.edge_states == made.edge_states &&
            read.edge_groups == made.edge_groups && read.distances == made.distances &&
            read.class_tokens == made.class_tokens);
      ++compared;
    } catch (const dlm::Error& error) {
      const std::string why = error.what();
      CHECK(why.find("no tokens of this vocabulary") != std::string::npos ||
            why.find("more than 131072 states") != std::string::npos);
    }
  }
  CHECK(compared > rounds / 2);
}

// Tests a choice between some words and any other text. In nearly every state inside a word, nearly
// all tokens are allowed.
void test_words_beside_any_text() {
  std::vector<std::string> tokens{"", "", "", "", "\"", "\"a", "b\""};
  for (size_t first = 0, length = 1; length <= 5; ++length) {
    const std::vector<std::string> shorter(tokens.begin() + static_cast<ptrdiff_t>(first),
                                           tokens.end());
    first = tokens.size();
    for (const std::string& each : length == 1 ? std::vector<std::string>{""} : shorter)
      if (each.find('"') == std::string::npos)
        for (const char letter : {'a', 'b', 'n'}) tokens.push_back(each + letter);
  }
  tokens.push_back(std::string(40, 'a') + std::string(40, 'b'));
  Budget budget(Limits{});
  Expressions e(budget);
  Automata automata(e);
  ByteSet letters;
  for (int byte = 'a'; byte <= 'z'; ++byte) letters.set(static_cast<size_t>(byte));
  const Node any = e.repeat(e.set(letters), 0, kUnbounded), quote = e.bytes("\"");
  const Node words =
      e.either({e.bytes("banana"), e.bytes("abba"), e.bytes("anna"), e.bytes("nab")});
  // Words and other texts have different continuations, so minimisation does not merge the states
  // of words.
  const Node texts = e.either(e.sequence({quote, words, quote, e.bytes("b")}),
                              e.sequence({quote, any, quote, e.bytes("nn")}));
  const Vocabulary vocabulary(tokens, static_cast<int32_t>(tokens.size()), {0}, nullptr);
  const dlm::Automaton made = token_automaton(automata.of(texts), vocabulary, budget);
  compare(automata.of(texts), made, tokens, {0}, true);
  check_classes(made);
}

void test_refusals() {
  const auto why = [](auto&& run) -> std::string {
    try {
      run();
      return "";
    } catch (const dlm::Error& error) {
      return error.what();
    }
  };
  CHECK(why([] { Vocabulary({"a"}, 1, {}, nullptr); }).find("need an end token") !=
        std::string::npos);
  CHECK(why([] { Vocabulary({"a"}, 1, {1}, nullptr); }).find("outside the vocabulary") !=
        std::string::npos);
  Limits limits;
  limits.edges = 100;
  const Vocabulary vocabulary({"", "a", "aa", "aaa"}, 4, {0}, nullptr);
  CHECK(why([&] {
          Budget budget(limits);
          Expressions e(budget);
          Automata automata(e);
          token_automaton(automata.of(e.repeat(e.bytes("a"), 0, 100)), vocabulary, budget);
        }).find("edges or more, and 100 are the limit") != std::string::npos);
}

}  // namespace

// The argument is the number of random automata.
int compile_token_test(int count, char** arguments) {
  std::mt19937 random(5);
  test_random_automata(random, count > 1 ? std::atoi(arguments[1]) : 150);
  test_words_beside_any_text();
  test_refusals();
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
