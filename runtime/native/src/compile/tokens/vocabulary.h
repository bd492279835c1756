// Stores the texts of a tokenizer's tokens as a tree of prefixes. token_walks.h uses this tree.
//
// The tree is exact only for byte-level vocabularies. In a byte-level vocabulary, each token is a
// string of bytes. The bytes of a text are the bytes of its tokens, one after another.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "compile/tokens/token_sets.h"

namespace dlm::compile {

class Vocabulary {
 public:
  // A function that encodes a text with the tokenizer. It returns the first token, or -1 if there
  // is no token.
  using FirstToken = std::function<int32_t(std::string_view text)>;

  // `tokens` contains the text of each id. The text is empty for tokens that a constrained text
  // must not contain. `ends` contains the end tokens, which may follow a text. Throws an Error with
  // status DLM_INVALID_ARGUMENT if there is no end token, or if an end token is outside the
  // vocabulary.
  Vocabulary(std::vector<std::string> tokens, int32_t vocab_size, std::vector<int32_t> ends,
             FirstToken first_token);
  Vocabulary(const Vocabulary&) = delete;
  Vocabulary& operator=(const Vocabulary&) = delete;

  int32_t vocab_size() const { return vocab_size_; }
  const std::vector<int32_t>& ends() const { return ends_; }
  const TokenTree& tree() const { return tree_; }

  // Encodes the text with the tokenizer, and returns the node of the first token. Returns -1 if the
  // first token is unknown, or if the text does not start with the text of this token.
  int32_t first_node(std::string_view text) const;

  // Returns sets of tree nodes, which the compiler needs to compile one constraint. If keep_sets()
  // has stored sets, returns these sets, and removes them from this object. Otherwise returns new
  // sets. Only one thread may use the returned sets. Any number of threads may call take_sets() and
  // keep_sets().
  std::unique_ptr<TokenSets> take_sets() const;
  // Stores sets for the next call of take_sets(), unless the sets are too large.
  void keep_sets(std::unique_ptr<TokenSets> sets) const;

 private:
  const std::vector<std::string> tokens_;
  const int32_t vocab_size_;
  const std::vector<int32_t> ends_;
  const FirstToken first_token_;
  TokenTree tree_;
  std::vector<int32_t> node_of_;  // [vocab_size]: the tree node of each token, or -1

  mutable std::mutex mutex_;
  mutable std::unique_ptr<TokenSets> kept_;
};

}  // namespace dlm::compile
