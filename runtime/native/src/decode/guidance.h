// Classifier-free guidance: compares predictions with and without the prompt.
//
// l = l_u + (w + 1)(l_c - l_u), where l_u are the logits of a canvas with all given tokens masked
// (LLaDA's loop, arXiv:2502.09992). One pass runs both canvases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decode/proposer.h"
#include "engines/engine.h"

namespace dlm {

// Computes guided logits, and the candidates and entropies that an engine would return for them.
class Guided {
 public:
  // Guides `rows` rows. conditional: predictions with the prompt. The other array holds logits
  // [rows, V] without it. A row with a NaN or +inf logit, or with only -inf, gets NaN
  // probabilities.
  Predictions guide(const Denoiser& denoiser, double scale, const Predictions& conditional,
                    const float* unconditional, size_t rows);

 private:
  void rank(const Denoiser& denoiser, size_t row);

  std::vector<float> logits_, probs_, entropy_;
  std::vector<int32_t> tokens_;
};

}  // namespace dlm
