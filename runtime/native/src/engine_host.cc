// Contexts in host memory, for the engines whose passes run there: one allocation each for the rows that a full pass gives
// and for those that are kept.
#include <climits>
#include <cstring>

#include "engine.h"
#include "error.h"

namespace dlm {
namespace {

// Keys and values of every layer in one allocation, which grows and never shrinks.
struct Rows {
  std::vector<std::byte> storage;
  std::vector<void*> keys, values;  // [layers], into storage

  void lay_out(const CacheShape& cache, int32_t rows) {
    const auto layers = static_cast<size_t>(cache.layers);
    const size_t bytes = cache.layer_bytes(rows);
    if (storage.size() < 2 * layers * bytes) storage.resize(2 * layers * bytes);
    keys.resize(layers);
    values.resize(layers);
    for (size_t i = 0; i < layers; ++i) {
      keys[i] = storage.data() + 2 * i * bytes;
      values[i] = storage.data() + (2 * i + 1) * bytes;
    }
  }
};

class HostContext final : public Context {
 public:
  HostContext(HostEngine& engine, const CacheShape& cache)
      : engine_(engine), cache_(cache), nothing_(static_cast<size_t>(cache.layers), nullptr) {}

  void run(const dlm_pass& wanted, CacheUse use) override {
    dlm_pass pass = wanted;
    pass.layers = cache_.layers;
    pass.past_keys = pass.past_values = nothing_.data();
    if (use == CacheUse::read) {
      pass.past_keys = past_.keys.data();
      pass.past_values = past_.values.data();
    }
    if (use == CacheUse::write) {
      present_.lay_out(cache_, pass.tokens);
      pass.present_keys = present_.keys.data();
      pass.present_values = present_.values.data();
    }
    engine_.run(pass);
  }

  void keep_outside(int32_t first, int32_t last, int32_t length) override {
    past_.lay_out(cache_, length - (last - first));
    for (size_t i = 0; i < past_.keys.size(); ++i) {
      copy_outside(first, last, length, present_.keys[i], past_.keys[i]);
      copy_outside(first, last, length, present_.values[i], past_.values[i]);
    }
  }

 private:
  void copy_outside(int32_t first, int32_t last, int32_t length, const void* present, void* past) const {
    const size_t row = cache_.row_bytes();
    const size_t before = static_cast<size_t>(first) * row, behind = static_cast<size_t>(length - last) * row;
    const auto* from = static_cast<const std::byte*>(present);
    auto* to = static_cast<std::byte*>(past);
    for (int32_t head = 0; head < cache_.kv_heads; ++head) {
      std::memcpy(to, from, before);
      std::memcpy(to + before, from + static_cast<size_t>(last) * row, behind);
      to += before + behind;
      from += static_cast<size_t>(length) * row;
    }
  }

  HostEngine& engine_;
  const CacheShape cache_;
  const std::vector<const void*> nothing_;  // [layers], the past of a pass without one
  Rows present_, past_;
};

class None final : public HostEngine {
 public:
  using HostEngine::HostEngine;

  void run(const dlm_pass&) override {
    fail(DLM_UNSUPPORTED, "the bundle was opened with engine \"none\", which makes no passes: open it with another engine");
  }

  std::string description() const override { return "none"; }
};

}  // namespace

int32_t Engine::max_rows(int32_t, int32_t) const { return INT32_MAX; }

std::string Engine::limits() const { return ""; }

std::unique_ptr<Context> HostEngine::open_context() { return std::make_unique<HostContext>(*this, cache_); }

std::unique_ptr<Engine> make_none(const CacheShape& cache) { return std::make_unique<None>(cache); }

}  // namespace dlm
