// Stores the texts of a tokenizer's tokens as a tree of prefixes. token_walks.h uses this tree.
//
// The bytes of a text must be the bytes of its tokens, one after another. In some vocabularies, the
// first token of a text has other bytes than the same token has elsewhere. For example, WordPiece
// and some SentencePiece tokenizers drop the space before the first word. For such vocabularies,
// the tree also contains the bytes of each token at the start of a text, after the byte kTextStart.
// start_text() changes a constraint accordingly.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "compile/automata/byte_automaton.h"
#include "compile/tokens/token_sets.h"

namespace dlm::compile {

class Vocabulary {
 public:
  // A function that encodes a text with the tokenizer. If is_start is false, other text comes
  // before the text. It returns the first token, or -1 if there is no token.
  using FirstToken = std::function<int32_t(std::string_view text, bool is_start)>;

  // `tokens` contains the text of each id. The text is empty for tokens that a constrained text
  // must not contain. The text of an added token is kNamed and the token's name. `starts` contains
  // the text of each id at the start of a text. It is empty if these texts are the same. `ends`
  // contains the end tokens, which may follow a text. If there are none, a text must fill all its
  // positions. Throws an Error with status DLM_INVALID_ARGUMENT if an end token is outside the
  // vocabulary.
  Vocabulary(std::vector<std::string> tokens, std::vector<std::string> starts, int32_t vocab_size,
             std::vector<int32_t> ends, FirstToken first_token);
  Vocabulary(const Vocabulary&) = delete;
  Vocabulary& operator=(const Vocabulary&) = delete;

  int32_t vocab_size() const { return vocab_size_; }
  const std::vector<int32_t>& ends() const { return ends_; }
  // Returns true if the tree contains kTextStart.
  bool has_starts() const { return !starts_.empty(); }
  const TokenTree& tree() const { return tree_; }

  // Encodes the text with the tokenizer, and returns the node of the first token. A text that
  // starts with kTextStart is encoded as the start of a text. Returns -1 if the first token is
  // unknown, or if the text does not start with the text of this token.
  int32_t first_node(std::string_view text) const;

  // Returns sets of tree nodes, which the compiler needs to compile one constraint. If keep_sets()
  // has stored sets, returns these sets, and removes them from this object. Otherwise returns new
  // sets. Only one thread may use the returned sets. Any number of threads may call take_sets() and
  // keep_sets().
  std::unique_ptr<TokenSets> take_sets() const;
  // Stores sets for the next call of take_sets(), unless the sets are too large.
  void keep_sets(std::unique_ptr<TokenSets> sets) const;

 private:
  // A token, and its text with kTextStart or without it.
  struct Entry {
    std::string_view text;
    int32_t token;
    bool is_start;
  };

  void add(const std::vector<Entry>& entries);

  const std::vector<std::string> tokens_;
  std::vector<std::string> starts_;  // each text begins with kTextStart
  const int32_t vocab_size_;
  const std::vector<int32_t> ends_;
  const FirstToken first_token_;
  TokenTree tree_;
  // [vocab_size]: the tree node of each token, or -1. start_node_of_: the same at the start of a
  // text.
  std::vector<int32_t> node_of_, start_node_of_;

  mutable std::mutex mutex_;
  mutable std::unique_ptr<TokenSets> kept_;
};

}  // namespace dlm::compile
