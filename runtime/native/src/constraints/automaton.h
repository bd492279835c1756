// A compiled constraint: an automaton over token ids that accepts the texts a request may produce.
//
// compile/token_automaton.cc builds it. A class holds the tokens that behave alike in every state.
// A group holds the classes that lead from one state to another. So the work of a pass grows with
// the classes and groups, not with the tokens.
//
// The file is little-endian: the magic "DLMAUTO"; version 1; six int32 sizes (vocabulary, states,
// classes, groups, members of all groups, edges); 32 bytes that identify the source; the first
// seven arrays of the struct, in order; and the SHA-256 of everything before it.
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dlm {

struct Automaton {
  int32_t vocab_size, states, classes, groups;
  std::vector<int32_t> token_class;  // [V]; -1: leads nowhere
  std::vector<int32_t> group_starts,
      group_classes;  // of group g: [group_starts[g], group_starts[g + 1]), ascending
  std::vector<int32_t> edge_starts;  // of state s: edges [edge_starts[s], edge_starts[s + 1])
  std::vector<int32_t> edge_states,
      edge_groups;                 // by edge: the next state, and the group that leads to it
  std::vector<int32_t> distances;  // by state: fewest tokens to the end of a text; 0: may end here
  std::vector<int32_t> class_starts,
      class_tokens;  // the tokens of class c are [class_starts[c], class_starts[c + 1]), ascending

  // The state after `token`, or -1. State 0 is the start state.
  int32_t next(int32_t state, int32_t token) const;
  bool has_class(int32_t group, int32_t number) const;
  bool has_token(int32_t group, int32_t token) const;  // false for -1

  // The lowest token of a class, and whether it is the only one.
  int32_t first_token(int32_t number) const {
    return class_tokens[static_cast<size_t>(class_starts[static_cast<size_t>(number)])];
  }
  bool is_one_token(int32_t number) const {
    return class_starts[static_cast<size_t>(number) + 1] ==
           class_starts[static_cast<size_t>(number)] + 1;
  }
};

// Fills class_starts and class_tokens from the other fields.
void list_tokens(Automaton& automaton);

// Returns the size of the file in bytes.
size_t file_size(const Automaton& automaton);

// Returns the bytes of the file. made_of: 32 bytes that identify the source; stored as they are.
std::vector<uint8_t> write_automaton(const Automaton& automaton, const uint8_t* made_of);

// The 32 bytes that identify the source. read_automaton must have accepted the file.
const uint8_t* made_of(const void* data);

// Checks everything in the file, so that later code can rely on every number. `where` starts
// messages. Throws Error(DLM_BAD_BUNDLE), or Error(DLM_UNSUPPORTED) for a file of another version.
Automaton read_automaton(const void* data, size_t size, const std::string& where);

// Reads and checks the file at `path`. Also throws Error(DLM_NOT_FOUND). `made_of` receives the 32
// bytes that identify the source.
Automaton open_automaton(const std::string& path, uint8_t* made_of);

}  // namespace dlm
