// Tests of constraints: files of automata, whole and damaged, and the most likely text against all there are.
//
// Compiled together with the sources, whose classes are hidden in the library. Prints "N passed, N failed"; the exit status is 1 if
// one failed.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "automaton.h"
#include "error.h"
#include "sha256.h"
#include "viterbi.h"

namespace {

int passed = 0, failed = 0;

void check(bool holds, int line, const char* what) {
  ++(holds ? passed : failed);
  if (!holds) std::printf("constraint_test.cc:%d: failed: %s\n", line, what);
}
#define CHECK(condition) check((condition), __LINE__, #condition)

struct Made {
  int32_t vocab_size, states, classes;
  std::vector<int32_t> token_class, group_starts, group_classes, edge_starts, edge_states, edge_groups, distances;
};

void put(std::vector<uint8_t>& out, const std::vector<int32_t>& values) {
  const auto* const bytes = reinterpret_cast<const uint8_t*>(values.data());
  out.insert(out.end(), bytes, bytes + values.size() * sizeof(int32_t));
}

std::vector<uint8_t> signed_file(std::vector<uint8_t> data) {
  dlm::Sha256 hash;
  hash.update(data.data(), data.size());
  const auto digest = hash.digest();
  data.insert(data.end(), digest.begin(), digest.end());
  return data;
}

std::vector<uint8_t> content(const Made& made) {
  const char magic[] = "DLMAUTO\x01";
  std::vector<uint8_t> out(magic, magic + 8);
  put(out, {made.vocab_size, made.states, made.classes, static_cast<int32_t>(made.group_starts.size()) - 1,
            static_cast<int32_t>(made.group_classes.size()), static_cast<int32_t>(made.edge_states.size())});
  out.resize(out.size() + 32);
  for (const auto* const values : {&made.token_class, &made.group_starts, &made.group_classes, &made.edge_starts, &made.edge_states,
                                   &made.edge_groups, &made.distances})
    put(out, *values);
  return out;
}

dlm::Automaton read(const std::vector<uint8_t>& file) { return dlm::read_automaton(file.data(), file.size(), "it"); }

// Any automaton of few tokens: of every state each class leads to one state, or nowhere.
Made random_automaton(std::mt19937& random) {
  const auto draw = [&](int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(random); };
  for (;;) {
    Made made;
    made.vocab_size = draw(2, 6), made.states = draw(1, 5);
    made.classes = draw(1, std::min(made.vocab_size, 4));
    for (int32_t token = 0; token < made.vocab_size; ++token)
      made.token_class.push_back(token < made.classes ? token : draw(-1, made.classes - 1));
    std::shuffle(made.token_class.begin(), made.token_class.end(), random);
    made.group_starts = {0}, made.edge_starts = {0};
    for (int32_t state = 0; state < made.states; ++state) {
      std::vector<std::vector<int32_t>> by_state(static_cast<size_t>(made.states));
      for (int32_t number = 0; number < made.classes; ++number)
        if (const int32_t to = draw(-1, made.states - 1); to >= 0) by_state[static_cast<size_t>(to)].push_back(number);
      for (size_t to = 0; to < by_state.size(); ++to) {
        if (by_state[to].empty()) continue;
        made.edge_groups.push_back(static_cast<int32_t>(made.group_starts.size()) - 1);
        made.edge_states.push_back(static_cast<int32_t>(to));
        made.group_classes.insert(made.group_classes.end(), by_state[to].begin(), by_state[to].end());
        made.group_starts.push_back(static_cast<int32_t>(made.group_classes.size()));
      }
      made.edge_starts.push_back(static_cast<int32_t>(made.edge_states.size()));
    }
    const int32_t never = std::numeric_limits<int32_t>::max();
    for (int32_t state = 0; state < made.states; ++state) made.distances.push_back(draw(0, 2) == 0 ? 0 : never);
    for (int32_t round = 0; round < made.states; ++round)
      for (size_t state = 0; state < made.distances.size(); ++state)
        for (int32_t edge = made.edge_starts[state]; edge < made.edge_starts[state + 1]; ++edge) {
          const int32_t behind = made.distances[static_cast<size_t>(made.edge_states[static_cast<size_t>(edge)])];
          if (behind != never) made.distances[state] = std::min(made.distances[state], behind + 1);
        }
    bool is_whole = true;
    for (size_t state = 0; state < made.distances.size(); ++state) {
      int32_t least = never;
      for (int32_t edge = made.edge_starts[state]; edge < made.edge_starts[state + 1]; ++edge)
        least = std::min(least, made.distances[static_cast<size_t>(made.edge_states[static_cast<size_t>(edge)])]);
      is_whole = is_whole && least == std::max(made.distances[state] - 1, 0);
    }
    if (is_whole) return made;
  }
}

void test_files(std::mt19937& random) {
  for (int32_t round = 0; round < 60; ++round) {
    const std::vector<uint8_t> whole = content(random_automaton(random));
    const dlm::Automaton automaton = read(signed_file(whole));
    CHECK(static_cast<size_t>(automaton.states) == automaton.distances.size());
    std::vector<uint8_t> damaged = signed_file(whole);
    damaged[std::uniform_int_distribution<size_t>(0, damaged.size() - 1)(random)] ^= 4;
    try {
      read(damaged);
      check(false, __LINE__, "a flipped bit was read");
    } catch (const dlm::Error& error) {
      CHECK(error.status() == DLM_BAD_BUNDLE || error.status() == DLM_UNSUPPORTED);
    }
    // What somebody signed may still say anything: it is refused, or harmless.
    for (int32_t change = 0; change < 40; ++change) {
      std::vector<uint8_t> hostile = whole;
      const size_t number = std::uniform_int_distribution<size_t>(0, hostile.size() / 4 - 1)(random);
      const int32_t values[] = {-1, 0, 1, 2, 7, 1 << 30, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()};
      std::memcpy(hostile.data() + number * 4, &values[change % 8], 4);
      if (change % 10 == 9) hostile.resize(std::uniform_int_distribution<size_t>(0, hostile.size())(random));
      try {
        const dlm::Automaton found = read(signed_file(hostile));
        dlm::Viterbi viterbi(found);
        std::vector<int32_t> tokens;
        const std::vector<dlm::Place> places(3);
        viterbi.solve(0, places, viterbi.reaching({}, 0), tokens);
        for (int32_t token = 0; token < found.vocab_size; ++token) CHECK(found.next(0, token) < found.states);
      } catch (const dlm::Error& error) {
        CHECK(error.status() == DLM_BAD_BUNDLE || error.status() == DLM_UNSUPPORTED);
      }
    }
  }
}

// What may stand at a place, and what it weighs.
bool weighs(const dlm::Place& place, int32_t token, double& weight) {
  weight = place.logits == nullptr ? 0.0 : static_cast<double>(place.logits[token]) - static_cast<double>(place.logits[place.best]);
  return place.token < 0 || token == place.token || token == place.other;
}

void test_most_likely_text(std::mt19937& random) {
  const auto draw = [&](int32_t low, int32_t high) { return std::uniform_int_distribution<int32_t>(low, high)(random); };
  for (int32_t round = 0; round < 2000; ++round) {
    const dlm::Automaton automaton = read(signed_file(content(random_automaton(random))));
    dlm::Viterbi viterbi(automaton);
    const auto length = static_cast<size_t>(draw(1, 4));
    const int32_t room = draw(0, 3), start = draw(0, automaton.states - 1);
    std::vector<std::vector<float>> logits(length);
    std::vector<dlm::Place> places(length);
    for (size_t i = 0; i < length; ++i) {
      // Whole numbers: many texts are equally likely.
      for (int32_t token = 0; token < automaton.vocab_size; ++token) logits[i].push_back(static_cast<float>(draw(-3, 3)));
      const int32_t kind = draw(0, 3);
      if (kind < 3) {
        places[i].logits = logits[i].data();
        places[i].best = static_cast<int32_t>(std::max_element(logits[i].begin(), logits[i].end()) - logits[i].begin());
      }
      if (kind > 1) places[i].token = draw(0, automaton.vocab_size - 1);
      if (kind == 2) places[i].other = places[i].best;
    }
    const std::vector<uint8_t> ends = viterbi.reaching({}, room);
    for (int32_t state = 0; state < automaton.states; ++state)
      CHECK((ends[static_cast<size_t>(state)] != 0) == (automaton.distances[static_cast<size_t>(state)] <= room));
    // All texts, in the order of their tokens: the first one of the best weight wins.
    std::vector<std::vector<int32_t>> seen(length);  // the classes at each place
    double best = -std::numeric_limits<double>::infinity();
    std::vector<int32_t> text, winner;
    const std::function<void(int32_t, size_t)> extend = [&](int32_t state, size_t i) {
      if (i == length) {
        double sum = 0, weight = 0;
        for (size_t k = length; k-- > 0;) weighs(places[k], text[k], weight), sum = weight + sum;
        if (ends[static_cast<size_t>(state)] == 0) return;
        if (sum > best) best = sum, winner = text;
        for (size_t k = 0; k < length; ++k) seen[k].push_back(automaton.token_class[static_cast<size_t>(text[k])]);
        return;
      }
      for (int32_t token = 0; token < automaton.vocab_size; ++token) {
        double weight = 0;
        const int32_t to = automaton.next(state, token);
        if (to < 0 || !weighs(places[i], token, weight)) continue;
        text.push_back(token);
        extend(to, i + 1);
        text.pop_back();
      }
    };
    extend(start, 0);
    std::vector<int32_t> found;
    const bool has_text = viterbi.solve(start, places, ends, found);
    CHECK(has_text == !winner.empty());
    if (has_text) CHECK(found == winner);
    viterbi.find_only(start, places, ends, found);
    for (size_t k = 0; has_text && k < length; ++k)
      if (places[k].token < 0) {
        const bool is_one = std::count(seen[k].begin(), seen[k].end(), seen[k][0]) == static_cast<ptrdiff_t>(seen[k].size());
        CHECK(found[k] == (is_one ? seen[k][0] : -1));
      }
    CHECK((viterbi.reaching(places, room)[static_cast<size_t>(start)] != 0) == has_text);
  }
}

}  // namespace

int main() {
  std::mt19937 random(7);
  test_files(random);
  test_most_likely_text(random);
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
