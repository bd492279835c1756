// A compiled constraint: an automaton over token ids that accepts the texts a request may produce.
//
// compile/token_automaton.cc builds it. A class holds the tokens that behave alike in every state.
// A group holds the classes that lead from one state to another. So the work of a pass grows with
// the classes and groups, not with the tokens.
//
// The file is little-endian: the magic "DLMAUTO"; version 1; six int32 sizes (vocabulary, states,
// classes, groups, members of all groups, edges); 32 bytes that identify the source; the first
// seven arrays of the struct, in order; and the SHA-256 of everything before it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/view.h"

namespace dlm {

struct Automaton {
  int32_t vocab_size, states, classes, groups;
  std::vector<int32_t> token_class;  // [V]; -1: leads nowhere
  // Starts of lists: list i has the elements [starts[i], starts[i + 1]) of the array after it.
  std::vector<int32_t> group_starts, group_classes;
  std::vector<int32_t> edge_starts;
  std::vector<int32_t> edge_states, edge_groups;  // the next state, the group that leads to it
  std::vector<int32_t> distances;  // by state: fewest tokens to the end of a text; 0: may end here
  std::vector<int32_t> class_starts, class_tokens;
  std::array<uint8_t, 32> made_of{};  // identifies the source

  struct Edge {
    int32_t state, group;
  };
  // The edges of a state, for loops.
  struct Edges {
    struct Iterator {
      const int32_t *state, *group;
      Edge operator*() const { return {*state, *group}; }
      Iterator& operator++() { return ++state, ++group, *this; }
      bool operator!=(const Iterator& other) const { return state != other.state; }
    };
    Iterator first, last;
    Iterator begin() const { return first; }
    Iterator end() const { return last; }
  };
  Edges edges(int32_t state) const {
    const int32_t first = edge_starts[state], last = edge_starts[state + 1];
    return {{edge_states.data() + first, edge_groups.data() + first},
            {edge_states.data() + last, edge_groups.data() + last}};
  }

  // The classes of a group and the tokens of a class, ascending.
  View<int32_t> classes_of(int32_t group) const {
    const auto first = static_cast<size_t>(group_starts[group]);
    return {group_classes.data() + first, static_cast<size_t>(group_starts[group + 1]) - first};
  }
  View<int32_t> tokens_of(int32_t number) const {
    const auto first = static_cast<size_t>(class_starts[number]);
    return {class_tokens.data() + first, static_cast<size_t>(class_starts[number + 1]) - first};
  }

  // The state after `token`, or -1. State 0 is the start state.
  int32_t next(int32_t state, int32_t token) const;
  bool has_class(int32_t group, int32_t number) const;
  bool has_token(int32_t group, int32_t token) const;  // false for -1
};

// Fills class_starts and class_tokens from the other fields.
void list_tokens(Automaton& automaton);

// Returns the size of the file in bytes.
size_t file_size(const Automaton& automaton);

// Returns the bytes of the file.
std::vector<uint8_t> write_automaton(const Automaton& automaton);

// Checks everything in the file, so that later code can rely on every number. `where` starts
// messages. Throws Error(DLM_BAD_BUNDLE), or Error(DLM_UNSUPPORTED) for a file of another version.
Automaton read_automaton(const void* data, size_t size, const std::string& where);

// Reads and checks the file at `path`. Also throws Error(DLM_NOT_FOUND).
Automaton open_automaton(const std::string& path);

}  // namespace dlm
