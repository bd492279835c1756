#include "compile/schema/quotes.h"

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "compile/automata/automata.h"
#include "compile/automata/numbers.h"

namespace dlm::compile::schema {
namespace {

using Next = std::array<int32_t, 256>;  // the next state for each byte, or -1

Next edges_of(const ByteAutomaton& texts, int32_t state) {
  Next next;
  next.fill(-1);
  for (uint32_t e = texts.starts[index(state)]; e < texts.starts[index(state) + 1]; ++e)
    for (int byte = texts.edges[e].low; byte <= texts.edges[e].high; ++byte)
      next[index(byte)] = texts.edges[e].state;
  return next;
}

// Returns the edges of a state inside a string, with edges for decoded characters in place of
// escapes, and without the closing quote.
Next characters_of(const ByteAutomaton& texts, int32_t state) {
  constexpr std::pair<char, char> kEscapes[] = {{'b', '\b'}, {'f', '\f'}, {'n', '\n'}, {'r', '\r'},
                                                {'t', '\t'}, {'"', '"'},  {'\\', '\\'}};
  Next next = edges_of(texts, state);
  next['"'] = -1;
  if (const int32_t escaped = std::exchange(next['\\'], -1); escaped >= 0)
    for (const auto& [letter, character] : kEscapes)
      if (const int32_t to = texts.next(escaped, static_cast<uint8_t>(letter)); to >= 0)
        next[static_cast<uint8_t>(character)] = to;
  return next;
}

void append_state(ByteAutomaton& made, const Next& next, uint8_t accepting) {
  made.accepting.push_back(accepting);
  made.starts.push_back(static_cast<uint32_t>(made.edges.size()));
  for (int byte = 0; byte < 256; ++byte)
    if (next[index(byte)] >= 0)
      append_edge(made, static_cast<uint8_t>(byte), static_cast<uint8_t>(byte), next[index(byte)]);
}

// The part of a JSON text to which a state of a minimal automaton belongs. The texts that can
// follow a state differ for these parts, so each state belongs to one part.
enum class Part : uint8_t { outside, name, string };

// The states from which an odd number of quotes follows are inside a string. If a colon follows
// the string, the string is a name.
std::vector<Part> parts_of(const ByteAutomaton& json, Budget& budget) {
  std::vector<Part> parts(json.states(), Part::outside);
  std::vector<uint8_t> seen(json.states(), 0);
  std::vector<std::vector<int32_t>> before(json.states());  // inside strings
  std::vector<std::pair<int32_t, bool>> open{{0, false}};
  std::vector<int32_t> names;
  seen[0] = 1;
  while (!open.empty()) {
    budget.check();
    const auto [state, is_inside] = open.back();
    open.pop_back();
    if (is_inside) parts[index(state)] = Part::string;
    const Next next = edges_of(json, state);
    const int32_t escaped = is_inside ? next['\\'] : -1;
    for (int byte = 0; byte < 256; ++byte) {
      const int32_t to = next[index(byte)];
      if (to < 0 || (is_inside && byte == '\\')) continue;
      const bool is_quote = byte == '"', is_inside_then = is_inside != is_quote;
      if (is_inside && is_inside_then) before[index(to)].push_back(state);
      if (is_inside && is_quote && json.next(to, ':') >= 0) names.push_back(state);
      if (!std::exchange(seen[index(to)], 1)) open.emplace_back(to, is_inside_then);
    }
    if (escaped < 0) continue;
    for (const int32_t to : edges_of(json, escaped))
      if (to >= 0) {
        before[index(to)].push_back(state);
        if (!std::exchange(seen[index(to)], 1)) open.emplace_back(to, true);
      }
  }
  while (!names.empty()) {
    const int32_t state = names.back();
    names.pop_back();
    if (std::exchange(parts[index(state)], Part::name) == Part::name) continue;
    names.insert(names.end(), before[index(state)].begin(), before[index(state)].end());
  }
  return parts;
}

}  // namespace

ByteAutomaton unquoted(const ByteAutomaton& strings, Budget& budget) {
  if (strings.is_empty()) return {};
  ByteAutomaton made;
  for (int32_t state = 0; state < static_cast<int32_t>(strings.states()); ++state) {
    budget.check();
    const int32_t closed = strings.next(state, '"');
    append_state(made, characters_of(strings, state),
                 closed >= 0 ? strings.accepting[index(closed)] : 0);
  }
  made.starts.push_back(static_cast<uint32_t>(made.edges.size()));
  return minimised(made, strings.next(0, '"'), budget);
}

Node requoted(Expressions& expressions, Node json, std::string_view quote) {
  Automata automata(expressions);
  const ByteAutomaton& texts = automata.of(json);
  if (texts.is_empty()) return json;
  Budget& budget = expressions.budget();
  const std::vector<Part> parts = parts_of(texts, budget);
  const std::string written = kNamed + std::string(quote);
  // The states after the first byte of `written` follow the states of `texts`. quoted() returns the
  // first of them. In the end, they lead to `to`.
  std::vector<int32_t> quoted_to(texts.states(), -1);
  std::vector<std::pair<uint8_t, int32_t>> added;
  const auto quoted = [&](int32_t to) {
    int32_t& first = quoted_to[index(to)];
    if (first >= 0) return first;
    first = static_cast<int32_t>(texts.states() + added.size());
    for (size_t i = 1; i < written.size(); ++i) {
      const bool is_last = i + 1 == written.size();
      added.emplace_back(static_cast<uint8_t>(written[i]),
                         is_last ? to : static_cast<int32_t>(texts.states() + added.size() + 1));
    }
    return first;
  };
  const auto in_name = [&](int32_t state) {
    Next next = edges_of(texts, state);
    const int32_t closed = next['"'];
    for (const char letter : std::string_view(",:{}[]<\"\\"))
      next[static_cast<uint8_t>(letter)] = -1;
    if (closed >= 0) next[':'] = texts.next(closed, ':');
    return next;
  };
  constexpr auto kFirst = static_cast<uint8_t>(kNamed);
  ByteAutomaton made;
  for (int32_t state = 0; state < static_cast<int32_t>(texts.states()); ++state) {
    budget.check();
    const int32_t quote_to = texts.next(state, '"');
    Next next;
    if (parts[index(state)] == Part::name) {
      next = in_name(state);
    } else if (parts[index(state)] == Part::string) {
      next = characters_of(texts, state);
      if (quote_to >= 0) next[kFirst] = quoted(quote_to);
    } else {
      next = edges_of(texts, state);
      next['"'] = -1;
      if (quote_to >= 0 && parts[index(quote_to)] == Part::string) {
        next[kFirst] = quoted(quote_to);
      } else if (quote_to >= 0) {
        const Next name = in_name(quote_to);
        for (int byte = 0; byte < 256; ++byte)
          if (byte != ':' && byte != ' ' && name[index(byte)] >= 0)
            next[index(byte)] = name[index(byte)];
      }
    }
    append_state(made, next, texts.accepting[index(state)]);
  }
  for (const auto& [byte, to] : added) {
    Next next;
    next.fill(-1);
    next[byte] = to;
    append_state(made, next, 0);
  }
  made.starts.push_back(static_cast<uint32_t>(made.edges.size()));
  const ByteAutomaton found = minimised(made, 0, budget);
  if (found.is_empty())
    throw Error(
        DLM_INVALID_ARGUMENT,
        "names of properties are written without quotes here, but a required name is "
        "empty, starts with a space, or contains one of the characters , : { } [ ] < \" and \\");
  return expressions.machine(found);
}

}  // namespace dlm::compile::schema
