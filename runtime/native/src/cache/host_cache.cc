// The context of an engine that runs in host memory. Each context has its own keys and values in
// host memory.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "base/error.h"
#include "cache/arena.h"
#include "cache/slots.h"
#include "engines/engine.h"

namespace dlm {
namespace {

class HostContext final : public Context {
 public:
  HostContext(HostEngine& engine, const CacheShape& cache, int32_t longest)
      : engine_(engine), cache_(cache), longest_(longest), pointers_(cache.size()) {
    for (size_t i = 0; i < cache.size(); ++i) {
      const auto alike = [&](const Group& group) { return group.kv_heads == cache[i].kv_heads; };
      auto found = std::find_if(groups_.begin(), groups_.end(), alike);
      if (found == groups_.end()) found = groups_.insert(found, {cache[i].kv_heads, {}, {}});
      found->layers.push_back(i);
    }
  }

  void run(const dlm_pass& wanted, CacheUse use) override {
    dlm_pass pass = wanted;
    const bool is_read = use != CacheUse::none && pass.cached > 0, is_written = keeps_rows(use);
    for (const Group& group : groups_)
      if (is_read && group.slots.kept() != pass.cached)
        fail(DLM_INTERNAL, "a pass over %d cached rows a head, but %d are kept", pass.cached,
             group.slots.kept());
    if (use == CacheUse::write) lay_out(pass.batch, pass.tokens, pass.tokens);
    if (use == CacheUse::append) make_room(pass.batch, pass.cached, pass.tokens);
    for (size_t i = 0; (is_read || is_written) && i < 2 * cache_.size(); ++i) {
      std::byte* const rows = storage_.get() + starts_[i];
      pointers_.set_past(i, rows);
      pointers_.set_present(i, rows + cache_[i / 2].tensor_bytes(pass.batch, pass.cached));
    }
    pointers_.put(pass, is_read, is_written);
    engine_.run(pass, {});
    if (!is_written) return;
    const auto first = static_cast<int32_t>(pass.position_ids[0]);
    for (Group& group : groups_) group.slots.note_written(first, pass.tokens, pass.cached);
    appended_ = use == CacheUse::append ? pass.tokens : 0;
    batch_ = pass.batch;
  }

  void keep_outside(int32_t first, int32_t last) override {
    const int32_t appended = std::exchange(appended_, 0);
    for (Group& group : groups_) {
      const int32_t cached = group.slots.kept();
      if (appended > 0 && first >= cached && last >= group.slots.length()) {
        append_in_order(group, cached, std::min(first, group.slots.length()) - cached, appended);
        continue;
      }
      const std::vector<Slots::Move> moves = group.slots.keep_outside(first, last);
      for (const size_t layer : group.layers) {
        const size_t row = cache_[layer].row_bytes();
        for (const size_t start : {starts_[2 * layer], starts_[2 * layer + 1]})
          apply(moves, storage_.get() + start, row);
      }
    }
  }

  uint64_t cache_bytes() const override { return used_bytes_; }

 private:
  // A group of layers with the same number of heads. The rows of these layers are laid out and
  // moved in the same way.
  struct Group {
    int32_t kv_heads;
    std::vector<size_t> layers;
    Slots slots;
  };

  // A pass with `append` has written `tokens` new rows for each head. This function moves the first
  // `kept` of them to the place after the head's `cached` rows. So the rows of a head stay in the
  // order of their positions. A denoiser with draft passes and attention in a window needs this
  // order.
  void append_in_order(Group& group, int32_t cached, int32_t kept, int32_t tokens) {
    const size_t heads = static_cast<size_t>(batch_) * group.kv_heads;
    for (const size_t layer : group.layers) {
      const size_t row = cache_[layer].row_bytes();
      const size_t before = cached * row, after = before + kept * row;
      for (const size_t start : {starts_[2 * layer], starts_[2 * layer + 1]}) {
        std::byte* const rows = storage_.get() + start;
        const std::byte* const fresh = rows + heads * before;
        fresh_.assign(fresh, fresh + heads * tokens * row);
        for (size_t head = heads; head-- > 0;) {
          std::memmove(rows + head * after, rows + head * before, before);
          std::memcpy(rows + head * after + before, fresh_.data() + head * tokens * row,
                      kept * row);
        }
      }
    }
    group.slots.note_in_order(cached + kept);
  }

  // Returns the offset of each tensor in storage with `rows` rows for every head. The last element
  // is the total size in bytes.
  std::vector<size_t> starts_of(int32_t batch, int32_t rows) const {
    std::vector<size_t> starts(1, 0);
    for (size_t i = 0; i < 2 * cache_.size(); ++i) {
      size_t end = 0;
      if (__builtin_add_overflow(starts.back(), cache_[i / 2].tensor_bytes(batch, rows), &end))
        throw std::bad_alloc();
      starts.push_back(end);
    }
    return starts;
  }

  // Lays out the storage with at least `rows` rows per head. If the storage already has room for
  // more rows, lays it out for up to `most` rows per head. The storage never shrinks.
  void lay_out(int32_t batch, int32_t rows, int32_t most) {
    used_bytes_ = 0;
    size_t bytes = starts_of(batch, rows).back();
    if (bytes > storage_bytes_) {
      storage_bytes_ = 0;
      storage_.reset();
      storage_.reset(new std::byte[bytes]);  // make_unique would fill all the memory with zeros
      storage_bytes_ = bytes;
    }
    capacity_ =
        static_cast<int32_t>(std::min(static_cast<size_t>(most), storage_bytes_ / (bytes / rows)));
    starts_ = starts_of(batch, capacity_);
    used_bytes_ = bytes;
    lay_out_slots(batch);
  }

  void lay_out_slots(int32_t batch) {
    for (Group& group : groups_)
      group.slots.lay_out(static_cast<size_t>(batch) * group.kv_heads, capacity_);
  }

  // Makes room for `tokens` new rows after the `cached` rows of each head. The cached rows keep
  // their content.
  void make_room(int32_t batch, int32_t cached, int32_t tokens) {
    const int32_t rows = cached + tokens;
    if (cached == 0) {
      lay_out(batch, rows, std::max(rows, longest_));
    } else if (rows > capacity_) {
      const int32_t most = grown(capacity_, rows, longest_);
      std::vector<size_t> starts = starts_of(batch, most);
      std::unique_ptr<std::byte[]> storage(new std::byte[starts.back()]);
      for (size_t i = 0; i + 1 < starts.size(); ++i)
        std::memcpy(storage.get() + starts[i], storage_.get() + starts_[i],
                    cache_[i / 2].tensor_bytes(batch, cached));
      storage_ = std::move(storage);
      storage_bytes_ = starts.back();
      starts_ = std::move(starts);
      capacity_ = most;
      lay_out_slots(batch);
    }
    used_bytes_ = std::max(used_bytes_, starts_of(batch, rows).back());
  }

  HostEngine& engine_;
  const CacheShape& cache_;  // belongs to the engine
  const int32_t longest_;
  // Keys of layer 0, values of layer 0, keys of layer 1, ...
  std::unique_ptr<std::byte[]> storage_;
  std::vector<size_t> starts_;  // [2 * layers + 1]: where each tensor starts in the storage
  int32_t capacity_ = 0;        // allocated rows per head
  size_t storage_bytes_ = 0, used_bytes_ = 0;
  int32_t appended_ = 0, batch_ = 0;  // appended_: number of new rows if the last pass used
                                      // `append`, otherwise 0
  std::vector<std::byte> fresh_;      // the new rows of a tensor while they are moved
  KeyValues pointers_;
  std::vector<Group> groups_;
};

class None final : public HostEngine {
 public:
  using HostEngine::HostEngine;

  void run(const dlm_pass&, const std::vector<Segment>&) override {
    fail(DLM_UNSUPPORTED,
         "the bundle was opened with engine \"none\", which runs no passes: open it with another "
         "engine");
  }

  std::string description() const override { return "none"; }
};

}  // namespace

std::unique_ptr<Context> HostEngine::open_context(int32_t longest) {
  return std::make_unique<HostContext>(*this, cache_, longest);
}

std::unique_ptr<Arena> Engine::open_arena(int32_t, int64_t, int64_t) { return nullptr; }

std::unique_ptr<Arena> HostEngine::open_arena(int32_t page_rows, int64_t rows, int64_t most_idle) {
  if (!takes_segments()) return nullptr;
  return std::make_unique<Arena>(*this, cache_, page_rows, rows, most_idle);
}

std::unique_ptr<Engine> make_none(CacheShape cache) {
  return std::make_unique<None>(std::move(cache));
}

}  // namespace dlm
