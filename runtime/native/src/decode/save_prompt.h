// Computes the keys and values of a prompt, and writes them to a prompt cache.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cache/prompt_cache.h"
#include "engines/engine.h"

namespace dlm {

// Computes the keys and values of the tokens in `canvas`, and writes them as a prompt cache to the
// file `path`. The number of tokens must be a multiple of format.page_rows. The denoiser must have
// block-causal attention, and the engine must accept segments. Calls before_pass before each pass.
// Throws the errors of the engine, of before_pass and of PromptCache::write.
void save_prompt(const Denoiser& denoiser, Engine& engine, const PromptCacheFormat& format,
                 const std::vector<int32_t>& canvas, const std::string& path,
                 const std::function<void()>& before_pass);

}  // namespace dlm
