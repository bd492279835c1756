#include "compile/automata/expression.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

namespace dlm::compile {
namespace {

constexpr char32_t kBeforeSurrogates = 0xD7FF, kBehindSurrogates = 0xE000, kLastPoint = 0x10FFFF;
// Estimated memory of one node, in bytes. This includes the node's entry in numbers_.
constexpr size_t kNodeBytes = 160;

template <class Number>
void append(std::string& out, Number number) {
  char raw[sizeof number];
  std::memcpy(raw, &number, sizeof number);
  out.append(raw, sizeof raw);
}

void append_without_surrogates(CodePoints& out, char32_t low, char32_t high) {
  high = std::min(high, kLastPoint);
  if (low > high) return;
  if (low <= kBeforeSurrogates) out.push_back({low, std::min(high, kBeforeSurrogates)});
  if (high >= kBehindSurrogates) out.push_back({std::max(low, kBehindSurrogates), high});
}

}  // namespace

CodePoints normalised(CodePoints ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const CodePointRange& a, const CodePointRange& b) { return a.low < b.low; });
  CodePoints out;
  for (const CodePointRange& range : ranges) {
    if (range.low > range.high) continue;
    if (!out.empty() && range.low <= out.back().high + 1)
      out.back().high = std::max(out.back().high, range.high);
    else
      out.push_back(range);
  }
  return out;
}

CodePoints complement(const CodePoints& points) {
  CodePoints out;
  char32_t next = 0;
  for (const CodePointRange& range : points) {
    if (range.low > next) append_without_surrogates(out, next, range.low - 1);
    next = range.high + 1;
  }
  if (next <= kLastPoint) append_without_surrogates(out, next, kLastPoint);
  return out;
}

Expressions::Expressions(Budget& budget) : budget_(budget) {
  add({Kind::nothing, false, 0, 0, 0, 0}, {});
  add({Kind::empty, true, 0, 0, 0, 0}, {});
}

// Returns the node with the kind of `item` and the given content. If there is no such node yet,
// adds `item` as a new node.
Node Expressions::add(const Item& item, const std::string& content) {
  std::string key(1, static_cast<char>(item.kind));
  key += content;
  const auto [at, is_new] = numbers_.try_emplace(std::move(key), static_cast<Node>(nodes_.size()));
  if (is_new) {
    bytes_ += kNodeBytes + 3 * content.size();
    budget_.check();
    budget_.check_memory(bytes_);
    nodes_.push_back(item);
  }
  return at->second;
}

Node Expressions::bytes(std::string_view text) {
  if (text.empty()) return empty();
  const auto index = static_cast<uint32_t>(texts_.size());
  const size_t before = nodes_.size();
  const Node node = add({Kind::bytes, false, index, 0, 0, 0}, std::string(text));
  if (node == before) texts_.emplace_back(text);
  return node;
}

Node Expressions::set(const ByteSet& bytes) {
  if (bytes.none()) return nothing();
  std::string content;
  for (size_t byte = 0; byte < bytes.size(); ++byte)
    if (bytes[byte]) content += static_cast<char>(byte);
  if (content.size() == 1) return this->bytes(content);
  const auto index = static_cast<uint32_t>(sets_.size());
  const size_t before = nodes_.size();
  const Node node = add({Kind::set, false, index, 0, 0, 0}, content);
  if (node == before) sets_.push_back(bytes);
  return node;
}

Node Expressions::characters(const CodePoints& points) {
  CodePoints kept;
  for (const auto& [low, high] : points) append_without_surrogates(kept, low, high);
  if (kept.empty()) return nothing();
  std::string content;
  for (const auto& [low, high] : kept) {
    append(content, low);
    append(content, high);
  }
  const auto index = static_cast<uint32_t>(points_.size());
  const size_t before = nodes_.size();
  const Node node = add({Kind::characters, false, index, 0, 0, 0}, content);
  if (node == before) points_.push_back(std::move(kept));
  return node;
}

Node Expressions::machine(const ByteAutomaton& automaton) {
  ByteAutomaton made = minimised(automaton, 0, budget_);
  if (made.is_empty()) return nothing();
  std::string content;
  for (size_t state = 0; state < made.states(); ++state) {
    append(content, made.accepting[state]);
    append(content, made.starts[state]);
  }
  for (const auto& [low, high, state] : made.edges) {
    append(content, low);
    append(content, high);
    append(content, state);
  }
  const auto index = static_cast<uint32_t>(automata_.size());
  const size_t before = nodes_.size();
  const Node node = add({Kind::machine, made.accepting.front() != 0, index, 0, 0, 0}, content);
  if (node == before) automata_.push_back(std::move(made));
  return node;
}

Node Expressions::add_pair(Kind kind, bool is_nullable, Node first, Node second) {
  std::string content;
  append(content, first);
  append(content, second);
  return add({kind, is_nullable, first, second, 0, 0}, content);
}

Node Expressions::sequence(Node first, Node second) {
  if (first == nothing() || second == nothing()) return nothing();
  if (first == empty()) return second;
  if (second == empty()) return first;
  return add_pair(Kind::sequence, is_nullable(first) && is_nullable(second), first, second);
}

Node Expressions::sequence(const std::vector<Node>& parts) {
  Node out = empty();
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) out = sequence(*part, out);
  return out;
}

Node Expressions::either(Node first, Node second) { return either(std::vector{first, second}); }

Node Expressions::either(std::vector<Node> choices) {
  std::sort(choices.begin(), choices.end());
  choices.erase(std::unique(choices.begin(), choices.end()), choices.end());
  if (!choices.empty() && choices.front() == nothing()) choices.erase(choices.begin());
  if (choices.empty()) return nothing();
  if (choices.size() == 1) return choices.front();
  std::string content;
  for (const Node choice : choices) append(content, choice);
  const bool is_nullable = std::any_of(choices.begin(), choices.end(),
                                       [&](Node choice) { return this->is_nullable(choice); });
  const auto index = static_cast<uint32_t>(choices_.size());
  const size_t before = nodes_.size();
  const Node node = add({Kind::either, is_nullable, index, 0, 0, 0}, content);
  if (node == before) choices_.push_back(std::move(choices));
  return node;
}

Node Expressions::repeat(Node part, uint32_t low, uint32_t high) {
  assert(low <= high);
  if (high == 0 || part == empty()) return empty();
  if (part == nothing()) return low == 0 ? empty() : nothing();
  if (is_nullable(part)) low = 0;
  if (kind(part) == Kind::repeat) {
    // (x{a,b}){c,d} equals x{a*c,b*d} if it matches every number of x from a*c to b*d. If the outer
    // repetition repeats k times, x repeats a*k to b*k times. With k + 1 repetitions, x repeats at
    // least a*(k + 1) times. So there is no gap between these two ranges if a*(k + 1) <= b*k + 1.
    // If this condition is true for the smallest k, it is true for every larger k. Without this
    // rewrite, the automaton of (x{1,100}){1,100} would have to follow thousands of ways to split
    // the same text.
    const uint64_t a = this->low(part), b = this->high(part), fewest = low > 0 ? low : 1;
    const bool has_gap = (high > fewest && b != kUnbounded && fewest * b + 1 < (fewest + 1) * a) ||
                         (low == 0 && a > 1);
    const uint64_t most =
        b == kUnbounded || high == kUnbounded ? uint64_t{kUnbounded} : b * uint64_t{high};
    const bool fits = b == kUnbounded || high == kUnbounded || most < kUnbounded;
    if (!has_gap && fits && a * low < kUnbounded)
      return repeat(first(part), static_cast<uint32_t>(a * low), static_cast<uint32_t>(most));
  }
  if (low == 1 && high == 1) return part;
  std::string content;
  append(content, part);
  append(content, low);
  append(content, high);
  return add({Kind::repeat, low == 0, part, 0, low, high}, content);
}

Node Expressions::both(Node first, Node second) {
  if (first == second) return first;
  if (first == nothing() || second == nothing()) return nothing();
  if (first > second) std::swap(first, second);
  return add_pair(Kind::both, is_nullable(first) && is_nullable(second), first, second);
}

Node Expressions::without(Node first, Node second) {
  if (first == second || first == nothing()) return nothing();
  if (second == nothing()) return first;
  return add_pair(Kind::without, is_nullable(first) && !is_nullable(second), first, second);
}

}  // namespace dlm::compile
