// A prompt cache is a file that contains the keys and values of a prompt. If the denoiser has
// block-causal attention, later requests can use these keys and values if their prompts start with
// the same tokens.
//
// A file contains a header, the tokens as int32, zeros up to a multiple of 64 bytes, and then the
// pages of the prompt, without gaps. The file ends with zeros up to a multiple of 64 bytes. A page
// contains the rows of page_rows() positions. The tensors of a page are in this order: keys of
// layer 0, values of layer 0, keys of layer 1, and so on. A tensor contains all rows of its first
// head, then all rows of its second head, and so on.
//
// Keys and values are used only with the graph that computed them. So the header contains a hash of
// this graph. The header also contains a checksum of the whole file, which detects damage. The
// checksum does not protect against malicious files. A malicious file can change the answers, but
// it cannot make the runtime access invalid memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/mapped_file.h"

namespace dlm {

// The properties that a bundle and its prompt caches must have in common.
struct PromptCacheFormat {
  std::string graph_sha256;  // lower-case hex
  int32_t cache_type;        // element type of the cache, see engines/graph_check.h
  int32_t page_rows;
  uint64_t page_bytes;
  int32_t vocab_size;
};

class PromptCache {
 public:
  // Maps a file and checks it. Throws an Error with status DLM_NOT_FOUND if the file is missing,
  // and an Error with status DLM_BAD_BUNDLE if the file is damaged or was made for a different
  // bundle. The file must not change while the object exists.
  PromptCache(const std::string& path, const PromptCacheFormat& format);

  const std::vector<int32_t>& tokens() const { return tokens_; }
  const std::byte* page(size_t number) const { return pages_ + number * page_bytes_; }

  // Writes a file. `read` copies a page to the memory that its second argument points to. The
  // number of tokens must be a multiple of format.page_rows. The file appears at `path` only when
  // it is complete. Throws an Error with status DLM_INVALID_ARGUMENT if the file cannot be written.
  static void write(const std::string& path, const PromptCacheFormat& format,
                    const std::vector<int32_t>& tokens,
                    const std::function<void(size_t, std::byte*)>& read);

 private:
  const MappedFile file_;
  std::vector<int32_t> tokens_;
  const std::byte* pages_ = nullptr;
  size_t page_bytes_ = 0;
};

// The prompt caches of a bundle. Several threads may use this object. An added prompt cache stays
// until the object is destroyed.
class PromptCaches {
 public:
  void add(std::unique_ptr<const PromptCache> cache);
  bool empty() const;

  // The prompt cache that has the most leading tokens in common with a prompt. `rows` is the number
  // of common leading tokens, rounded down to whole pages. `rows` is at most `most`, and is 0 if no
  // prompt cache matches. The prompt must have at least `most` tokens.
  struct Found {
    const PromptCache* cache = nullptr;
    int32_t rows = 0;
  };
  Found find(const std::vector<int32_t>& tokens, int32_t most, int32_t page_rows) const;

 private:
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<const PromptCache>> caches_;
};

}  // namespace dlm
