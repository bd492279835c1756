// A constraint as a file has it: an automaton over token ids, whose texts are the ones that a
// request may come to.
//
// compile/token_automaton.cc makes it. Tokens that behave alike in every state are a class, classes
// that lead from one state to another a group, so that work a pass grows with these and not with
// tokens.
//
// The file is little-endian: the magic "DLMAUTO" and the version 1; the sizes as six int32
// (vocabulary, states, classes, groups, members of all groups, edges); 32 bytes that say what it
// was made of; the first seven arrays of the struct in their order; and the SHA-256 of all before
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
      group_classes;  // of group g the classes [group_starts[g], group_starts[g + 1]), ascending
  std::vector<int32_t> edge_starts;  // of state s the edges [edge_starts[s], edge_starts[s + 1])
  std::vector<int32_t> edge_states,
      edge_groups;                 // of an edge the state behind it, and the group that leads there
  std::vector<int32_t> distances;  // of a state the fewest tokens to where a text may end; 0: here
  std::vector<int32_t> class_starts,
      class_tokens;  // of class c the tokens [class_starts[c], class_starts[c + 1]), ascending

  // The state behind `token`, or -1. State 0 is the first.
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

// Fills class_starts and class_tokens from the rest.
void list_tokens(Automaton& automaton);

// The bytes of its file.
size_t file_size(const Automaton& automaton);

// The file. made_of: 32 bytes of the caller's that it keeps.
std::vector<uint8_t> write_automaton(const Automaton& automaton, const uint8_t* made_of);

// The 32 bytes that a file keeps. It must have passed read_automaton.
const uint8_t* made_of(const void* data);

// Checks all of a file's content: what follows may rely on every number of it. `where` starts the
// messages. Throws Error(DLM_BAD_BUNDLE), and Error(DLM_UNSUPPORTED) for a file of another version.
Automaton read_automaton(const void* data, size_t size, const std::string& where);

// The file at `path`, read and checked. Throws Error(DLM_NOT_FOUND) as well. `made_of`: where its
// 32 bytes go.
Automaton open_automaton(const std::string& path, uint8_t* made_of);

}  // namespace dlm
