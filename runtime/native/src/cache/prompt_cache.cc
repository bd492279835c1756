#include "cache/prompt_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "base/descriptor.h"
#include "base/error.h"
#include "engines/graph_check.h"

namespace dlm {
namespace {

constexpr char kMagic[8] = {'D', 'L', 'M', 'C', 'A', 'C', 'H', 'E'};
constexpr uint32_t kVersion = 1;
constexpr size_t kAlignment = 64;

// All numbers are little-endian. On a machine with a different byte order, the version number is
// wrong and the file is rejected.
struct Header {
  char magic[8];
  uint32_t version;
  int32_t cache_type, page_rows, zero;
  int64_t tokens;
  uint64_t page_bytes;
  char graph_sha256[64];
  char unused[16];
  uint64_t checksum;  // checksum of the whole file, computed while this member is 0
};
static_assert(sizeof(Header) == 2 * kAlignment);

// Computes a checksum of data whose size is a multiple of 64 bytes. A change of a single word is
// always detected. Any other change is detected with a probability of 1 - 2^-64. The checksum is
// not a cryptographic hash, but it is about ten times as fast as SHA-256.
class Checksum {
 public:
  void add(const void* data, size_t bytes) {
    const auto* from = static_cast<const char*>(data);
    for (const char* const end = from + bytes; from != end; from += kAlignment) {
      std::array<uint64_t, kLanes> words;
      std::memcpy(words.data(), from, kAlignment);
      for (size_t lane = 0; lane < kLanes; ++lane) mix(lanes_[lane], words[lane]);
    }
    bytes_ += bytes;
  }

  uint64_t value() const {
    uint64_t state = bytes_;
    for (const uint64_t lane : lanes_) mix(state, lane);
    return state ^ (state >> 32);
  }

 private:
  static constexpr size_t kLanes = kAlignment / sizeof(uint64_t);
  static void mix(uint64_t& state, uint64_t word) {
    state = (state ^ word) * 0x9E3779B97F4A7C15u;
    state = (state << 29) | (state >> 35);
  }

  std::array<uint64_t, kLanes> lanes_{1, 2, 3, 4, 5, 6, 7, 8};
  uint64_t bytes_ = 0;
};

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// A file that is written under a temporary name. The destructor removes the file unless finish()
// was called.
class PartialFile {
 public:
  explicit PartialFile(const std::string& path)
      : path_(path),
        partial_(path + ".partial-" + std::to_string(getpid())),
        file_(open(partial_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644)) {
    if (!file_.is_open()) refuse();
  }
  ~PartialFile() {
    if (file_.is_open() && !is_finished_) unlink(partial_.c_str());
  }
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;

  void write(const void* data, size_t bytes, size_t at) {
    const auto* const from = static_cast<const char*>(data);
    for (size_t done = 0; done < bytes;) {
      const ssize_t now =
          pwrite(file_.number(), from + done, bytes - done, static_cast<off_t>(at + done));
      if (now < 0 && errno == EINTR) continue;
      if (now <= 0) refuse();
      done += static_cast<size_t>(now);
    }
  }
  // Gives the file its final name, and replaces an existing file of this name.
  void finish() {
    if (fsync(file_.number()) != 0 || rename(partial_.c_str(), path_.c_str()) != 0) refuse();
    is_finished_ = true;
  }

 private:
  [[noreturn]] void refuse() const {
    throw Error(DLM_INVALID_ARGUMENT, path_ + ": cannot write: " + std::strerror(errno));
  }

  const std::string path_, partial_;
  const Descriptor file_;
  bool is_finished_ = false;
};

}  // namespace

PromptCache::PromptCache(const std::string& path, const PromptCacheFormat& format)
    : file_(path, DLM_BAD_BUNDLE, true), page_bytes_(format.page_bytes) {
  const auto refuse = [&](const std::string& why) {
    throw Error(DLM_BAD_BUNDLE,
                path + ": " + why + ". Save the prompt cache again with this bundle");
  };
  Header header;
  if (file_.bytes() < sizeof header) refuse("not a prompt cache: the file is too short");
  std::memcpy(&header, file_.data(), sizeof header);
  if (!std::equal(std::begin(kMagic), std::end(kMagic), header.magic))
    refuse("not a prompt cache: the first bytes are wrong");
  if (header.version != kVersion)
    refuse("prompt cache of version " + std::to_string(header.version) +
           ", but this runtime reads only version " + std::to_string(kVersion));
  if (header.cache_type != format.cache_type)
    refuse(std::string("the keys and values are ") + type_name(header.cache_type) +
           ", but this bundle's keys and values are " + type_name(format.cache_type));
  if (format.graph_sha256.compare(0, std::string::npos, header.graph_sha256,
                                  sizeof header.graph_sha256) != 0)
    refuse("the prompt cache was saved with a different bundle");
  if (header.page_rows != format.page_rows || header.page_bytes != format.page_bytes)
    refuse("the pages have a size that this bundle does not use");
  // The comparison with `most` below also makes sure that later products do not overflow.
  const auto rows = static_cast<size_t>(format.page_rows);
  const size_t most = file_.bytes() / page_bytes_;
  const auto count = static_cast<size_t>(header.tokens);
  if (header.tokens <= 0 || count % rows != 0 || count / rows > most)
    refuse("damaged: the number of tokens is wrong");
  const size_t start = aligned(sizeof header + count * sizeof(int32_t));
  if (file_.bytes() != aligned(start + count / rows * page_bytes_))
    refuse("damaged: the file has " + std::to_string(file_.bytes()) + " bytes instead of " +
           std::to_string(aligned(start + count / rows * page_bytes_)));
  const uint64_t expected = header.checksum;
  header.checksum = 0;
  Checksum checksum;
  checksum.add(&header, sizeof header);
  checksum.add(file_.data() + sizeof header, file_.bytes() - sizeof header);
  if (checksum.value() != expected) refuse("damaged: the checksum is wrong");
  tokens_.resize(count);
  std::memcpy(tokens_.data(), file_.data() + sizeof header, count * sizeof(int32_t));
  for (const int32_t token : tokens_)
    if (token < 0 || token >= format.vocab_size)
      refuse("token " + std::to_string(token) + " is outside the vocabulary");
  pages_ = file_.data() + start;
}

void PromptCache::write(const std::string& path, const PromptCacheFormat& format,
                        const std::vector<int32_t>& tokens,
                        const std::function<void(size_t, std::byte*)>& read) {
  Header header{};
  std::copy(std::begin(kMagic), std::end(kMagic), header.magic);
  header.version = kVersion;
  header.cache_type = format.cache_type;
  header.page_rows = format.page_rows;
  header.tokens = static_cast<int64_t>(tokens.size());
  header.page_bytes = format.page_bytes;
  format.graph_sha256.copy(header.graph_sha256, sizeof header.graph_sha256);
  PartialFile file(path);
  Checksum checksum;
  checksum.add(&header, sizeof header);
  // Data that is not written yet. Each write has a multiple of 64 bytes.
  std::vector<std::byte> pending(aligned(tokens.size() * sizeof(int32_t)));
  std::memcpy(pending.data(), tokens.data(), tokens.size() * sizeof(int32_t));
  size_t at = sizeof header;
  const auto flush = [&](size_t bytes) {
    checksum.add(pending.data(), bytes);
    file.write(pending.data(), bytes, at);
    at += bytes;
    pending.erase(pending.begin(), pending.begin() + static_cast<std::ptrdiff_t>(bytes));
  };
  flush(pending.size());
  for (size_t number = 0; number < tokens.size() / format.page_rows; ++number) {
    const size_t before = pending.size();
    pending.resize(before + format.page_bytes);
    read(number, pending.data() + before);
    flush(pending.size() / kAlignment * kAlignment);
  }
  pending.resize(aligned(pending.size()));
  flush(pending.size());
  header.checksum = checksum.value();
  file.write(&header, sizeof header, 0);
  file.finish();
}

void PromptCaches::add(std::unique_ptr<const PromptCache> cache) {
  const std::lock_guard<std::mutex> lock(mutex_);
  caches_.push_back(std::move(cache));
}

bool PromptCaches::empty() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return caches_.empty();
}

PromptCaches::Found PromptCaches::find(const std::vector<int32_t>& tokens, int32_t most,
                                       int32_t page_rows) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Found found;
  for (const auto& cache : caches_) {
    const std::vector<int32_t>& theirs = cache->tokens();
    const auto end = tokens.begin() + most;
    const auto alike = std::mismatch(tokens.begin(), end, theirs.begin(), theirs.end()).first;
    const auto rows = static_cast<int32_t>(alike - tokens.begin()) / page_rows * page_rows;
    if (rows > found.rows) found = {cache.get(), rows};
  }
  return found;
}

}  // namespace dlm
