// Computes tables about the states of a byte automaton: the next state of each byte, the text that
// must follow, and the states that treat bytes alike.
#include "compile/token_states.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "compile/numbers.h"

namespace dlm::compile {
namespace {

// A state inside a string takes nearly all bytes, and most of them lead to one state. States inside
// words and numbers take few bytes.
constexpr int kManyBytes = 24, kBytesAlike = 16;
constexpr int32_t kEncodedBytes = 96;  // most bytes of a forced text that the tokenizer is given
constexpr int32_t kNone = -1;

Kinds kinds_of(const ByteAutomaton& texts) {
  std::array<uint8_t, 257> is_start{};
  is_start[0] = 1;
  for (const ByteEdge& edge : texts.edges) is_start[edge.low] = is_start[edge.high + 1u] = 1;
  Kinds out;
  for (size_t byte = 0; byte < 256; ++byte) {
    if (is_start[byte]) out.byte[out.count++] = static_cast<uint8_t>(byte);
    out.of[byte] = static_cast<uint8_t>(out.count - 1);
  }
  return out;
}

}  // namespace

TokenStates::TokenStates(const ByteAutomaton& texts, Budget& budget)
    : texts_(texts), budget_(budget), kinds_(kinds_of(texts)) {
  fill_table();
  find_forced();
  find_parts();
}

void TokenStates::fill_table() {
  budget_.check_memory(texts_.states() * kinds_.count * sizeof(int32_t));
  table_.assign(texts_.states() * kinds_.count, kNone);
  for (size_t state = 0; state < texts_.states(); ++state) {
    budget_.check();
    int32_t* const row = table_.data() + state * kinds_.count;
    for (uint32_t i = texts_.starts[state]; i < texts_.starts[state + 1]; ++i) {
      const auto& [low, high, to] = texts_.edges[i];
      for (size_t kind = kinds_.of[low]; kind <= kinds_.of[high]; ++kind) row[kind] = to;
    }
  }
}

void TokenStates::find_forced() {
  const size_t states = texts_.states();
  forced_.assign(states, 0);
  const auto is_forced = [&](size_t state) {
    return texts_.starts[state + 1] - texts_.starts[state] == 1 && !texts_.accepting[state] &&
           texts_.edges[texts_.starts[state]].low == texts_.edges[texts_.starts[state]].high;
  };
  std::vector<int32_t> path;
  for (size_t state = 0; state < states; ++state) {
    budget_.check();
    auto at = static_cast<int32_t>(state);
    path.clear();
    while (forced_[index(at)] == 0 && is_forced(index(at))) {
      path.push_back(at);
      at = texts_.edges[texts_.starts[index(at)]].state;
    }
    int32_t length = forced_[index(at)];
    while (!path.empty()) {
      forced_[index(path.back())] = ++length;
      path.pop_back();
    }
  }
}

void TokenStates::find_parts() {
  const size_t states = texts_.states();
  part_.assign(states, kNone);
  is_hub_.assign(states, 0);
  std::vector<uint8_t> is_wide(states, 0);
  std::unordered_map<int32_t, int> alike;  // number of bytes that lead to each state
  for (size_t state = 0; state < states; ++state) {
    budget_.check();
    int bytes = 0, most = 0;
    alike.clear();
    for (uint32_t i = texts_.starts[state]; i < texts_.starts[state + 1]; ++i) {
      const auto& [low, high, to] = texts_.edges[i];
      bytes += high - low + 1;
      most = std::max(most, alike[to] += high - low + 1);
    }
    if (const auto back = alike.find(static_cast<int32_t>(state)); back != alike.end())
      is_hub_[state] = back->second >= kBytesAlike;
    is_wide[state] = bytes >= kManyBytes && most >= kBytesAlike;
  }
  // Each part is connected. A single tree for all states would have to tell too many bytes apart,
  // so it would not merge many tokens.
  std::vector<int32_t> leader(states);
  for (size_t state = 0; state < states; ++state) leader[state] = static_cast<int32_t>(state);
  const auto find = [&](int32_t state) {
    while (leader[index(state)] != state) {
      leader[index(state)] = leader[index(leader[index(state)])];
      state = leader[index(state)];
    }
    return state;
  };
  for (size_t state = 0; state < states; ++state)
    for (uint32_t i = texts_.starts[state]; is_wide[state] && i < texts_.starts[state + 1]; ++i)
      if (is_wide[index(texts_.edges[i].state)])
        leader[index(find(static_cast<int32_t>(state)))] = find(texts_.edges[i].state);
  std::unordered_map<int32_t, std::vector<int32_t>> members;
  for (size_t state = 0; state < states; ++state)
    if (is_wide[state])
      members[find(static_cast<int32_t>(state))].push_back(static_cast<int32_t>(state));
  std::map<ByteClasses, int32_t> known;  // parts with equal byte classes are one part
  for (size_t state = 0; state < states; ++state) {
    const auto at = members.find(static_cast<int32_t>(state));
    if (at == members.end() || at->second.size() < 2) continue;
    const ByteClasses classes = classes_of(at->second);
    const auto [part, is_new] = known.try_emplace(classes, static_cast<int32_t>(parts_.size()));
    if (is_new) parts_.push_back(classes);
    for (const int32_t member : at->second) part_[index(member)] = part->second;
  }
}

// Bytes are in one class if each of these states has the same next state for all of them.
ByteClasses TokenStates::classes_of(const std::vector<int32_t>& states) {
  std::vector<int16_t> number(kinds_.count, 0);
  std::vector<size_t> first{0};  // a kind of each class
  for (const int32_t state : states) {
    budget_.check();
    bool holds = true;
    for (size_t kind = 0; kind < kinds_.count && holds; ++kind)
      holds = next(state, kind) == next(state, first[static_cast<size_t>(number[kind])]);
    if (holds) continue;
    std::map<std::pair<int16_t, int32_t>, int16_t> numbers;
    first.clear();
    for (size_t kind = 0; kind < kinds_.count; ++kind) {
      const auto [at, is_new] = numbers.try_emplace({number[kind], next(state, kind)},
                                                    static_cast<int16_t>(numbers.size()));
      if (is_new) first.push_back(kind);
      number[kind] = at->second;
    }
  }
  ByteClasses out;
  for (size_t byte = 0; byte < 256; ++byte) out[byte] = number[kinds_.of[byte]];
  // Leave out bytes that none of the states takes.
  for (size_t kind = 0; kind < kinds_.count; ++kind) {
    if (std::any_of(states.begin(), states.end(),
                    [&](int32_t state) { return next(state, kind) >= 0; }))
      continue;
    for (size_t byte = 0; byte < 256; ++byte)
      if (kinds_.of[byte] == kind) out[byte] = kNone;
  }
  return out;
}

std::string TokenStates::text_after(int32_t state) const {
  std::string out;
  while (forced_[index(state)] > 0 && out.size() < kEncodedBytes) {
    const ByteEdge& edge = texts_.edges[texts_.starts[index(state)]];
    out += static_cast<char>(edge.low);
    state = edge.state;
  }
  const auto byte_at = [&](size_t i) { return static_cast<uint8_t>(out[i]); };
  if ((byte_at(0) & 0xC0) == 0x80) return "";
  size_t last = out.size() - 1;  // where the last character starts
  while (last > 0 && (byte_at(last) & 0xC0) == 0x80) --last;
  const uint8_t lead = byte_at(last);
  const size_t needed = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (out.size() - last < needed) out.resize(last);
  return out;
}

}  // namespace dlm::compile
