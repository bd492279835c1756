// Tests of constraints. Some tests read valid and damaged automaton files. Another test lists all
// texts of a constraint, and compares the most likely text and random samples with this list.
//
// The library does not export the tested classes, so this program is compiled with the library's
// sources. Prints "N passed, N failed". The exit status is 1 if a check failed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/sha256.h"
#include "constraints/automaton.h"
#include "constraints/marginals.h"
#include "constraints/viterbi.h"
#include "decode/exact_sum.h"
#include "dlm_runtime.h"
#include "tests.h"

namespace {

int passed = 0, failed = 0;

void check(bool holds, int line, const char* what) {
  ++(holds ? passed : failed);
  if (!holds) std::printf("constraint_test.cc:%d: failed: %s\n", line, what);
}
#define CHECK(condition) check((condition), __LINE__, #condition)

struct Made {
  int32_t vocab_size, states, classes;
  std::vector<int32_t> token_class, group_starts, group_classes, edge_starts, edge_states,
      edge_groups, distances;
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
  put(out, {made.vocab_size, made.states, made.classes,
            static_cast<int32_t>(made.group_starts.size()) - 1,
            static_cast<int32_t>(made.group_classes.size()),
            static_cast<int32_t>(made.edge_states.size())});
  out.resize(out.size() + 32);
  for (const auto* const values :
       {&made.token_class, &made.group_starts, &made.group_classes, &made.edge_starts,
        &made.edge_states, &made.edge_groups, &made.distances})
    put(out, *values);
  return out;
}

dlm::Automaton read(const std::vector<uint8_t>& file) {
  return dlm::read_automaton(file.data(), file.size(), "it");
}

// Makes a random automaton with few tokens. From each state, a class of tokens leads to at most one
// state.
Made random_automaton(std::mt19937& random) {
  const auto draw = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
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
        if (const int32_t to = draw(-1, made.states - 1); to >= 0)
          by_state[static_cast<size_t>(to)].push_back(number);
      for (size_t to = 0; to < by_state.size(); ++to) {
        if (by_state[to].empty()) continue;
        made.edge_groups.push_back(static_cast<int32_t>(made.group_starts.size()) - 1);
        made.edge_states.push_back(static_cast<int32_t>(to));
        made.group_classes.insert(made.group_classes.end(), by_state[to].begin(),
                                  by_state[to].end());
        made.group_starts.push_back(static_cast<int32_t>(made.group_classes.size()));
      }
      made.edge_starts.push_back(static_cast<int32_t>(made.edge_states.size()));
    }
    const int32_t never = std::numeric_limits<int32_t>::max();
    for (int32_t state = 0; state < made.states; ++state)
      made.distances.push_back(draw(0, 2) == 0 ? 0 : never);
    for (int32_t round = 0; round < made.states; ++round)
      for (size_t state = 0; state < made.distances.size(); ++state)
        for (int32_t edge = made.edge_starts[state]; edge < made.edge_starts[state + 1]; ++edge) {
          const int32_t behind =
              made.distances[static_cast<size_t>(made.edge_states[static_cast<size_t>(edge)])];
          if (behind != never) made.distances[state] = std::min(made.distances[state], behind + 1);
        }
    bool is_whole = true;
    for (size_t state = 0; state < made.distances.size(); ++state) {
      int32_t least = never;
      for (int32_t edge = made.edge_starts[state]; edge < made.edge_starts[state + 1]; ++edge)
        least = std::min(
            least,
            made.distances[static_cast<size_t>(made.edge_states[static_cast<size_t>(edge)])]);
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
    // A file with a valid hash may still have any content. The reader must reject the file, or its
    // automaton must be safe to use.
    for (int32_t change = 0; change < 40; ++change) {
      std::vector<uint8_t> hostile = whole;
      const size_t number =
          std::uniform_int_distribution<size_t>(0, hostile.size() / 4 - 1)(random);
      const int32_t values[] = {-1,
                                0,
                                1,
                                2,
                                7,
                                1 << 30,
                                std::numeric_limits<int32_t>::max(),
                                std::numeric_limits<int32_t>::min()};
      std::memcpy(hostile.data() + number * 4, &values[change % 8], 4);
      if (change % 10 == 9)
        hostile.resize(std::uniform_int_distribution<size_t>(0, hostile.size())(random));
      try {
        const dlm::Automaton found = read(signed_file(hostile));
        dlm::Viterbi viterbi(found);
        std::vector<int32_t> tokens;
        const std::vector<dlm::Place> places(3);
        const std::vector<uint8_t> ends = viterbi.ways().reaching({}, 0);
        viterbi.solve(0, places, ends, tokens);
        dlm::Texts texts(found, found.vocab_size);
        std::vector<dlm::Marginal> marginals;
        if (texts.sum(0, places, ends, {1, 1, 0}))
          texts.draw({7, 0, 0}, tokens), texts.find_marginals(tokens, true, marginals);
        for (int32_t token = 0; token < found.vocab_size; ++token)
          CHECK(found.next(0, token) < found.states);
      } catch (const dlm::Error& error) {
        CHECK(error.status() == DLM_BAD_BUNDLE || error.status() == DLM_UNSUPPORTED);
      }
    }
  }
}

// The reader rejects a file in which a class leads from one state to two states. This does not
// depend on which of the two edges has the larger group.
void test_ambiguous_files() {
  // The tokens are a and b. From state 0, the group {a, b} leads back to state 0, and the group {b}
  // leads to state 1, where a text may end.
  Made made{2, 2, 2, {0, 1}, {0, 2, 3}, {0, 1, 1}, {0, 2, 3}, {0, 1, 1}, {0, 1, 1}, {1, 0}};
  const auto is_refused = [&] {
    try {
      read(signed_file(content(made)));
    } catch (const dlm::Error& error) {
      return error.status() == DLM_BAD_BUNDLE &&
             std::strstr(error.what(),
                         "state 0 has two edges for class 1, so its texts are ambiguous: compile "
                         "the constraint again") != nullptr;
    }
    return false;
  };
  CHECK(is_refused());
  made.edge_groups = {1, 0, 1};
  CHECK(is_refused());
  made.edge_groups = {1, 1, 1};
  CHECK(is_refused());
  made.group_starts = {0, 1, 2}, made.group_classes = {0, 1}, made.edge_groups = {0, 1, 1};
  CHECK(!is_refused());
}

// An exact sum of doubles, stored as a list of partial sums that do not overlap (Shewchuk, 1997;
// Python's math.fsum).
class Partials {
 public:
  void add(double x) {
    size_t kept = 0;
    for (double y : partials_) {
      if (std::fabs(x) < std::fabs(y)) std::swap(x, y);
      const double high = x + y, low = y - (high - x);
      if (low != 0) partials_[kept++] = low;
      x = high;
    }
    partials_.resize(kept);
    partials_.push_back(x);
  }
  double value() const {  // the largest partial sum determines the sign and all bits but the last
    return std::accumulate(partials_.begin(), partials_.end(), 0.0);
  }

 private:
  std::vector<double> partials_;
};

void test_exact_sums(std::mt19937& random) {
  for (int32_t round = 0; round < 1000; ++round) {
    dlm::ExactSum sum;
    Partials wanted;
    for (int32_t i = 0; i < 20; ++i) {
      const float value = std::ldexp(std::normal_distribution<float>(0, 1)(random),
                                     std::uniform_int_distribution<int32_t>(-149, 125)(random));
      if (i % 2 == 0)
        sum = sum + dlm::ExactSum(value), wanted.add(static_cast<double>(value));
      else
        sum = sum - dlm::ExactSum(value), wanted.add(-static_cast<double>(value));
    }
    CHECK(std::fabs(sum.value() - wanted.value()) <= std::fabs(wanted.value()) * 0x1p-51);
    CHECK(!(sum < sum) && sum == sum && (sum < dlm::ExactSum(0.0f)) == (wanted.value() < 0));
  }
}

// An automaton, and the places of a text: for each token of the text, its row of logits. `start` is
// the state where the text starts.
struct Problem {
  dlm::Automaton automaton;
  std::vector<std::vector<float>> logits;
  std::vector<dlm::Place> places;
  int32_t room, start;
};

// Makes a random problem. Its logits are small integers, so that many texts are equally likely.
Problem random_problem(std::mt19937& random) {
  const auto draw = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  Problem problem{read(signed_file(content(random_automaton(random)))), {}, {}, draw(0, 3), 0};
  problem.start = draw(0, problem.automaton.states - 1);
  const auto length = static_cast<size_t>(draw(1, 4));
  problem.logits.resize(length), problem.places.resize(length);
  for (size_t i = 0; i < length; ++i) {
    std::vector<float>& logits = problem.logits[i];
    for (int32_t token = 0; token < problem.automaton.vocab_size; ++token)
      logits.push_back(static_cast<float>(draw(-3, 3)));
    const int32_t kind = draw(0, 4),
                  best = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) -
                                              logits.begin());
    dlm::Place& place = problem.places[i];
    if (kind < 3) place.logits = logits.data(), place.best = best;
    if (kind == 1 || kind == 3) place.token = draw(0, problem.automaton.vocab_size - 1);
    if (kind == 1) place.other = best;
    if (kind == 4) place.best = draw(0, problem.automaton.vocab_size - 1);
  }
  return problem;
}

// Returns true if a place allows the token, and sets `weight` to the token's weight.
bool weighs(const dlm::Place& place, int32_t token, double& weight) {
  if (place.logits != nullptr)
    weight =
        static_cast<double>(place.logits[token]) - static_cast<double>(place.logits[place.best]);
  else
    weight = place.best < 0 || token == place.best ? 0 : -1;
  return place.token < 0 || token == place.token || token == place.other;
}

// Calls see(text) for each valid text of the problem, in ascending order of its tokens.
void each_text(const Problem& problem, const std::vector<uint8_t>& ends,
               const std::function<void(const std::vector<int32_t>&)>& see) {
  std::vector<int32_t> text;
  const std::function<void(int32_t)> extend = [&](int32_t state) {
    if (text.size() == problem.places.size()) {
      if (ends[static_cast<size_t>(state)] != 0) see(text);
      return;
    }
    const dlm::Place& place = problem.places[text.size()];
    for (int32_t token = 0; token < problem.automaton.vocab_size; ++token) {
      double weight = 0;
      const int32_t to = problem.automaton.next(state, token);
      if (to < 0 || !weighs(place, token, weight)) continue;
      text.push_back(token);
      extend(to);
      text.pop_back();
    }
  };
  extend(problem.start);
}

// Tests the search for the best token of a class that has more tokens than the code searches at a
// time.
void test_long_classes(std::mt19937& random) {
  constexpr int32_t vocab_size = 3000;
  Made made{vocab_size, 2, 2, {}, {0, 1, 2}, {0, 1}, {0, 1, 2}, {1, 1}, {0, 1}, {1, 0}};
  for (int32_t token = 0; token < vocab_size; ++token)
    made.token_class.push_back(token % 3 == 0 ? 0 : token == 2999 ? -1 : 1);
  const dlm::Automaton automaton = read(signed_file(content(made)));
  dlm::Viterbi viterbi(automaton);
  for (int32_t round = 0; round < 50; ++round) {
    std::vector<float> logits(vocab_size);
    for (float& logit : logits)
      logit = static_cast<float>(std::uniform_int_distribution<int32_t>(-40, 40)(random));
    if (round % 5 == 0)
      std::fill(logits.begin(), logits.end(), -std::numeric_limits<float>::infinity());
    logits[1] = 50;  // a token of the other class
    int32_t wanted = 0;
    for (int32_t token = 0; token < vocab_size; token += 3)
      if (logits[static_cast<size_t>(token)] > logits[static_cast<size_t>(wanted)]) wanted = token;
    dlm::Place place;
    place.logits = logits.data(), place.best = 1;
    std::vector<int32_t> found;
    CHECK(viterbi.solve(0, {place}, {0, 1}, found));
    CHECK(found == std::vector<int32_t>{wanted});
  }
}

// ---- Extreme logits and temperatures, compared with all texts in exact arithmetic ----

// A text, and the numbers that the exact reference computes for it.
struct Known {
  std::vector<int32_t> tokens;
  int32_t ruled_out = 0, cut = 0;
  std::vector<double> logits;  // the logits of the tokens that are not avoided, and the negated
                               // best logit of each row
  double prob = 0;
};

double exact_difference(const Known& a, const Known& b) {
  Partials sum;
  for (const double logit : a.logits) sum.add(logit);
  for (const double logit : b.logits) sum.add(-logit);
  return sum.value();
}

float extreme_logit(std::mt19937& random, int32_t palette) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  const float values[] = {
      -kInfinite, -3.4028235e38f, -3e38f, -1e30f,        -1e14f, -20,   -1, 0, 1, 3,
      20,         1e12f,          3e38f,  3.4028235e38f, 1e-38f, 1e-45f};
  const auto draw = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  switch (palette) {
    case 0:
      return draw(0, 1) == 0 ? -kInfinite : static_cast<float>(draw(-3, 3));
    case 1:
      return values[draw(0, 15)];
    case 2:
      return values[draw(0, 3)];
    case 3:
      return draw(0, 2) == 0 ? -3.4028235e38f : static_cast<float>(draw(-20, 20)) / 4;
    case 4:
      return std::ldexp(std::normal_distribution<float>(0, 1)(random), draw(-40, 40));
    default:
      return std::normal_distribution<float>(0, 4)(random);
  }
}

// Finds the tokens that top_p and top_k exclude at each place. Follows the definition in
// decode/sampling.h, one token at a time.
std::vector<std::vector<uint8_t>> cut_tokens(const Problem& problem,
                                             const dlm::Sampling& sampling) {
  std::vector<std::vector<uint8_t>> cut;
  for (const dlm::Place& place : problem.places) {
    cut.emplace_back(static_cast<size_t>(problem.automaton.vocab_size));
    if (place.logits == nullptr || place.token >= 0 || std::isinf(place.logits[place.best]))
      continue;
    std::vector<int32_t> order(cut.back().size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return place.logits[a] > place.logits[b]; });
    const auto weight = [&](int32_t token) {
      return std::exp((static_cast<double>(place.logits[token]) -
                       static_cast<double>(place.logits[place.best])) /
                      sampling.temperature);
    };
    double total = 0, before = 0;
    for (const int32_t token : order) total += weight(token);
    for (size_t rank = 0; rank < order.size(); ++rank) {
      const bool is_behind = sampling.top_k > 0 && rank >= static_cast<size_t>(sampling.top_k);
      cut.back()[static_cast<size_t>(order[rank])] =
          is_behind || (rank > 0 && sampling.top_p < 1 && before > sampling.top_p * total) ? 1 : 0;
      before += weight(order[rank]);
    }
  }
  return cut;
}

std::vector<Known> know_texts(const Problem& problem, const std::vector<uint8_t>& ends,
                              const std::vector<std::vector<uint8_t>>& cut, bool is_drawn) {
  std::vector<Known> all;
  each_text(problem, ends, [&](const std::vector<int32_t>& text) {
    Known known;
    known.tokens = text;
    for (size_t k = 0; k < text.size(); ++k) {
      const dlm::Place& place = problem.places[k];
      const auto token = static_cast<size_t>(text[k]);
      if (place.logits == nullptr || (is_drawn && place.token >= 0)) {
        if (!is_drawn && place.best >= 0 && text[k] != place.best) known.logits.push_back(-1);
        continue;
      }
      if (std::isinf(place.logits[token])) {
        ++known.ruled_out;
        continue;
      }
      known.logits.push_back(static_cast<double>(place.logits[token]));
      known.logits.push_back(-static_cast<double>(place.logits[place.best]));
      known.cut += cut[k][token];
    }
    all.push_back(std::move(known));
  });
  return all;
}

void check_best_text(const Problem& problem, const std::vector<uint8_t>& ends, bool is_exact) {
  const std::vector<Known> all = know_texts(problem, ends, cut_tokens(problem, {1, 1, 0}), false);
  dlm::Viterbi viterbi(problem.automaton);
  std::vector<int32_t> found;
  CHECK(viterbi.solve(problem.start, problem.places, ends, found) == !all.empty());
  if (all.empty()) return;
  const Known* best = &all.front();
  const Known* taken = nullptr;
  for (const Known& known : all) {
    if (known.ruled_out < best->ruled_out ||
        (known.ruled_out == best->ruled_out && exact_difference(known, *best) > 0))
      best = &known;
    if (known.tokens == found) taken = &known;
  }
  CHECK(taken != nullptr);
  if (taken == nullptr || taken == best) return;
  // The tested code adds numbers as double unless they are large, so its sums may have rounding
  // errors.
  const double total = std::fabs(exact_difference(*best, Known()));
  CHECK(!is_exact && taken->ruled_out == best->ruled_out && total < 0x1p21 &&
        exact_difference(*best, *taken) <= static_cast<double>(found.size()) * total * 0x1p-52);
}

void check_draws(Problem problem, const std::vector<uint8_t>& ends, const dlm::Sampling& sampling,
                 int32_t draws) {
  for (dlm::Place& place : problem.places) {
    place.other = -1;
    if (place.logits == nullptr) place.best = -1;
  }
  std::vector<Known> all = know_texts(problem, ends, cut_tokens(problem, sampling), true);
  dlm::Texts texts(problem.automaton, problem.automaton.vocab_size);
  CHECK(texts.sum(problem.start, problem.places, ends, sampling) == !all.empty());
  if (all.empty()) return;
  const auto avoids_more = [](const Known& a, const Known& b) {
    return std::pair(a.ruled_out, a.cut) < std::pair(b.ruled_out, b.cut);
  };
  const Known* best = &all.front();
  for (const Known& known : all)
    if (avoids_more(known, *best) ||
        (!avoids_more(*best, known) && exact_difference(known, *best) > 0))
      best = &known;
  double total = 0;
  for (Known& known : all)
    if (!avoids_more(*best, known))
      total += known.prob = std::exp(exact_difference(known, *best) / sampling.temperature);
  std::vector<std::vector<double>> probs(
      problem.places.size(),
      std::vector<double>(static_cast<size_t>(problem.automaton.vocab_size)));
  for (Known& known : all) {
    known.prob /= total;
    for (size_t k = 0; k < known.tokens.size(); ++k)
      probs[k][static_cast<size_t>(known.tokens[k])] += known.prob;
  }
  std::vector<dlm::Marginal> marginals;
  const Known& chosen = *best;
  texts.find_marginals(chosen.tokens, true, marginals);
  for (size_t k = 0; k < chosen.tokens.size(); ++k) {
    CHECK(std::fabs(marginals[k].prob - probs[k][static_cast<size_t>(chosen.tokens[k])]) < 1e-8);
    if (problem.places[k].token >= 0) continue;
    double entropy = 0;
    for (const double prob : probs[k]) entropy += prob > 0 ? prob * std::log(prob) : 0;
    std::sort(probs[k].rbegin(), probs[k].rend());
    CHECK(std::fabs(marginals[k].entropy - entropy) < 1e-6);
    CHECK(std::fabs(marginals[k].margin - (probs[k][0] - probs[k][1])) < 1e-8);
  }
  std::map<std::vector<int32_t>, int32_t> counts;
  std::vector<int32_t> drawn;
  for (int32_t seed = 0; seed < draws; ++seed)
    texts.draw({static_cast<uint64_t>(seed), 5, 11}, drawn), ++counts[drawn];
  double statistic = 0, rest = 0, rest_seen = 0;
  int32_t freedom = -1, seen = 0;
  const auto meet = [&](double expected, double count) {
    statistic += (count - expected) * (count - expected) / expected, ++freedom;
  };
  for (const Known& known : all) {
    const auto found = counts.find(known.tokens);
    const int32_t count = found == counts.end() ? 0 : found->second;
    seen += count;
    CHECK(count == 0 || known.prob > 1e-15);
    if (draws * known.prob >= 5)
      meet(draws * known.prob, count);
    else
      rest += draws * known.prob, rest_seen += count;
  }
  CHECK(seen == draws);  // every sample is one of the texts
  if (rest >= 5) meet(rest, rest_seen);
  if (freedom > 0)
    CHECK(statistic <=
          // At most one in 10^6 correct results exceeds this limit.
          freedom + 5 * std::sqrt(2.0 * freedom) + 14);
}

void test_extreme_logits(std::mt19937& random, int32_t rounds) {
  const double temperatures[] = {5e-324, 1e-310, 1e-300, 1e-100, 1e-28, 1e-16, 1e-8,  1e-3,
                                 0.3,    1,      5,      1e3,    1e8,   1e38,  1e100, 1e300};
  const auto draw = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  for (int32_t round = 0; round < rounds; ++round) {
    Problem problem = random_problem(random);
    const int32_t palette = round % 6;
    const bool has_nan = round % 17 == 0;
    for (size_t i = 0; i < problem.places.size(); ++i) {
      std::vector<float>& logits = problem.logits[i];
      for (float& logit : logits) logit = extreme_logit(random, palette);
      if (has_nan && i == 0) logits[0] = std::numeric_limits<float>::quiet_NaN();
      dlm::Place& place = problem.places[i];
      if (place.logits == nullptr) continue;
      place.best =
          static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
      if (place.other >= 0) place.other = place.best;
    }
    const std::vector<uint8_t> ends = dlm::Ways(problem.automaton).reaching({}, problem.room);
    const dlm::Sampling sampling{temperatures[draw(0, 15)], draw(0, 2) == 0 ? 0.7 : 1,
                                 draw(0, 2) == 0 ? draw(1, 3) : 0};
    if (has_nan) {  // Requests with NaN logits fail, but the code must not crash.
      dlm::Viterbi viterbi(problem.automaton);
      dlm::Texts texts(problem.automaton, problem.automaton.vocab_size);
      std::vector<int32_t> tokens;
      std::vector<dlm::Marginal> marginals;
      viterbi.solve(problem.start, problem.places, ends, tokens);
      for (dlm::Place& place : problem.places) place.other = -1;
      if (texts.sum(problem.start, problem.places, ends, sampling)) {
        texts.draw({7, 0, 0}, tokens);
        texts.find_marginals(tokens, true, marginals);
      }
      continue;
    }
    // A palette is a kind of random logits (see extreme_logit). With palettes 0, 2 and 3, sums are
    // exact multiples of a small power of 2, or too large for double, so the tested code must find
    // exactly the best text.
    check_best_text(problem, ends, palette == 0 || palette == 2 || palette == 3);
    check_draws(problem, ends, sampling, round % 5 == 0 ? 800 : 5);
  }
}

// ---- Requests, through the C ABI ----

// The tokens are the letters a, b, c, c and x, an end token and the mask token. The constraint is
// (ab|c)*x.
constexpr int32_t kLetters = 8, kEnd = 6, kMask = 7;

Made letters() {
  return {kLetters,
          3,
          5,
          {0, 1, 2, 2, 3, -1, 4, -1},
          {0, 1, 2, 3, 4, 5},
          {2, 0, 3, 1, 4},
          {0, 3, 4, 5},
          {0, 1, 2, 0, 2},
          {0, 1, 2, 3, 4},
          {1, 2, 0}};
}

// A denoiser with random logits. One of its passes fails.
struct Noise {
  std::mt19937 random;
  int32_t fails_at = -1, passes = 0;
  dlm_session* cancels = nullptr;  // if not NULL, the pass before the failing pass cancels this
                                   // session
};

dlm_status run_noise(void* user, const dlm_pass* pass) {
  auto& noise = *static_cast<Noise*>(user);
  if (noise.cancels != nullptr && noise.passes + 1 == noise.fails_at)
    dlm_session_cancel(noise.cancels, DLM_ALL_REQUESTS);
  if (noise.passes++ == noise.fails_at) return DLM_ENGINE_FAILED;
  for (int32_t row = 0; row < pass->batch * pass->rows; ++row) {
    float logits[kLetters], sum = 0;
    for (float& logit : logits) logit = std::normal_distribution<float>(0, 3)(noise.random);
    logits[kMask] = -std::numeric_limits<float>::infinity();
    int32_t order[kLetters];
    for (int32_t token = 0; token < kLetters; ++token)
      order[token] = token, sum += std::exp(logits[token]);
    std::stable_sort(order, order + kLetters,
                     [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    for (int32_t rank = 0; rank < 2; ++rank) {
      pass->top_tokens[2 * row + rank] = order[rank];
      pass->top_probs[2 * row + rank] = std::exp(logits[order[rank]]) / sum;
    }
    if (pass->logits != nullptr)
      std::copy(logits, logits + kLetters, pass->logits + row * kLetters);
    if (pass->entropy != nullptr) pass->entropy[row] = -1;
  }
  return DLM_OK;
}

// Runs requests that are cancelled, reach a limit for passes or time, or fail. If a request does
// not fail, its text must be complete. There must be no leak.
void test_requests(std::mt19937& random) {
  const auto draw = [&](int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random);
  };
  const std::vector<uint8_t> file = signed_file(content(letters()));
  const dlm::Automaton known = read(file);
  Noise noise;
  dlm_denoiser denoiser;
  dlm_denoiser_init(&denoiser, sizeof denoiser);
  denoiser.vocab_size = kLetters, denoiser.mask_token_id = kMask, denoiser.max_canvas_length = 64;
  denoiser.layers = denoiser.kv_heads = denoiser.head_size = 1;
  denoiser.eos_token_ids = &kEnd, denoiser.eos_count = 1;
  dlm_bundle* bundle = nullptr;
  dlm_session* session = nullptr;
  CHECK(dlm_bundle_from_callback(&denoiser, run_noise, &noise, nullptr, 0, &bundle) == DLM_OK);
  CHECK(dlm_session_create(bundle, nullptr, 0, &session) == DLM_OK);
  int32_t seen[7] = {}, refused = 0, failures = 0;
  const char* const scores[] = {"prediction", "draw", "marginal"};
  for (int32_t round = 0; round < 1000; ++round) {
    dlm_automaton* automaton = nullptr;
    dlm_constraint constraint;
    dlm_constraint_init(&constraint, sizeof constraint);
    constraint.kind = DLM_CONSTRAINT_COMPILED;
    constraint.content = reinterpret_cast<const char*>(file.data()),
    constraint.content_size = file.size();
    CHECK(dlm_automaton_compile(nullptr, &constraint, nullptr, 0, &automaton) == DLM_OK);
    const bool has_beginning = draw(0, 2) == 0;  // "ab" or "ac"
    dlm_policy policy;
    dlm_policy_init(&policy, sizeof policy);
    policy.block_length = draw(1, 9), policy.score_of = scores[draw(0, 2)],
    policy.seed = static_cast<uint64_t>(round);
    if (draw(0, 1) == 0)
      policy.select = "sample", policy.temperature = 0.7, policy.top_p = draw(0, 1) == 0 ? 1 : 0.6;
    dlm_request request;
    dlm_request_init(&request, sizeof request);
    request.policy = &policy, request.max_new_tokens = draw(0, 12), request.max_steps = draw(0, 4);
    request.constraint = automaton, request.constrained_tokens = has_beginning ? 2 : 0;
    if (draw(0, 9) == 0) request.deadline_ms = 1e-6;
    noise.passes = 0, noise.fails_at = draw(0, 20),
    noise.cancels = draw(0, 2) == 0 ? session : nullptr;
    const int32_t given[] = {5, 0, draw(0, 7) == 0 ? 2 : 1};
    request.tokens = given, request.token_count = 3;
    const dlm_result* result = nullptr;
    const dlm_status status = dlm_session_generate(session, &request, &result);
    dlm_automaton_destroy(automaton);
    if (status == DLM_INVALID_ARGUMENT)
      CHECK(request.max_new_tokens == 0 || (has_beginning && given[2] == 2)), ++refused;
    if (status == DLM_ENGINE_FAILED) ++failures;
    CHECK(status == DLM_OK || status == DLM_INVALID_ARGUMENT || status == DLM_ENGINE_FAILED);
    if (status != DLM_OK) continue;
    ++seen[result->finish];
    int32_t state = 0;
    for (size_t i = has_beginning ? 1 : 3; i < result->length && state >= 0; ++i)
      state = known.next(state, result->tokens[i]);
    CHECK(request.max_new_tokens == 0 ||
          (state >= 0 && known.distances[static_cast<size_t>(state)] == 0));
  }
  CHECK(refused > 0 && failures > 0);
  for (const int32_t finish : {DLM_FINISH_STOP, DLM_FINISH_STEPS, DLM_FINISH_DEADLINE,
                               DLM_FINISH_CANCELLED, DLM_FINISH_CONSTRAINT})
    CHECK(seen[finish] > 0);
  dlm_session_destroy(session);
  dlm_bundle_destroy(bundle);
}

}  // namespace

// The argument is the number of random constraints that are tested with extreme logits.
int constraint_test(int count, char** arguments) {
  std::mt19937 random(7);
  test_extreme_logits(random, count > 1 ? std::atoi(arguments[1]) : 600);
  test_files(random);
  test_ambiguous_files();
  test_exact_sums(random);
  test_long_classes(random);
  test_requests(random);
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
