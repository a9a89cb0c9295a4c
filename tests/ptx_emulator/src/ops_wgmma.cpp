// wgmma (PTX ISA 9.7.15): m64nNk16 of f16 and bf16, m64nNk32 of fp8, fp32 accumulators, or f16 ones of f16 and fp8.
//
// Accumulator: register i of lane l of warp w holds row 16 w + l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (l % 4) +
// i % 2; of f16 accumulators, registers hold two columns. A in registers lies as the A of mma.m16n8k16 (k32 with bytes)
// does, 16 rows per warp.
#include <algorithm>
#include <cstring>

#include "errors.h"
#include "lanes.h"
#include "machine.h"
#include "matrix_operand.h"
#include "numeric.h"
#include "opcode_table.h"
#include "vectors.h"
#include "warpgroup.h"

namespace ptx_emulator {

namespace {

constexpr uint32_t kRowsPerWarp = 16;

struct ProductData : InstructionData {
    uint32_t n = 0;
    ElementType a_type = ElementType::kBf16, b_type = ElementType::kBf16;
    bool a_in_registers = false;
    bool a_mn_major = false, b_mn_major = false;
    bool negate_a = false, negate_b = false;
    bool half_accumulators = false;
};

Warpgroup& warpgroup_of(Warp& warp) {
    return warp.cta.warpgroups[warp.index / kWarpgroupWarps];
}

void negate(std::vector<float>& values) {
    for (float& value : values) value = -value;
}

// Rows 16 w to 16 w + 15 of A from the registers of warp w.
void load_register_rows(const Warp& warp, const Instruction& i, const ProductData& data, float* values) {
    const uint32_t size = element_size(data.a_type), per_register = 4 / size, depth = 32 / size;
    for (uint32_t r = 0; r < 4; ++r) {
        const auto* registers = warp.lanes<uint32_t>(i.list[1][r]);
        for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
            const uint32_t row = lane / 4 + (r & 1) * 8;
            const uint32_t k = (lane % 4 + (r >> 1) * 4) * per_register;
            for (uint32_t e = 0; e < per_register; ++e) {
                const uint32_t bits = registers[lane] >> (8 * size * e);
                uint8_t bytes[4];
                std::memcpy(bytes, &bits, 4);
                values[row * depth + k + e] = widen_element(data.a_type, bytes);
            }
        }
    }
}

void run_product(Cta& cta, uint32_t first_warp, const WarpgroupProduct& product) {
    const Instruction& i = *product.instruction;
    const auto& data = static_cast<const ProductData&>(*i.data);
    const uint32_t depth = 32 / element_size(data.b_type), n = data.n;
    static thread_local std::vector<float> a, b, d;
    a.resize(64 * depth);
    b.resize(size_t{n} * depth);
    d.resize(64 * n);
    MatrixOperand{wgmma_descriptor(product.b), data.b_type, data.b_mn_major, 0, n}.load(cta, b.data());
    if (data.a_in_registers) {
        for (uint32_t w = 0; w < kWarpgroupWarps; ++w) {
            load_register_rows(*cta.warps[first_warp + w], i, data, &a[w * kRowsPerWarp * depth]);
        }
    } else {
        MatrixOperand{wgmma_descriptor(product.a), data.a_type, data.a_mn_major, 0, 64}.load(cta, a.data());
    }
    if (data.negate_a) negate(a);
    if (data.negate_b) negate(b);
    // Calls f(registers of the even columns, of the odd ones, row) for lanes 4g to 4g + 3, which hold 8 columns of it.
    auto for_rows = [&](auto f) {
        for (uint32_t w = 0; w < kWarpgroupWarps; ++w) {
            Warp& warp = *cta.warps[first_warp + w];
            for (uint32_t column = 0; column < n; column += 8) {
                for (uint32_t h = 0; h < 2; ++h) {
                    float* even = warp.lanes<float>(i.list[0][column / 2 + 2 * h]);
                    float* odd = warp.lanes<float>(i.list[0][column / 2 + 2 * h + 1]);
                    float* row = &d[size_t{w * kRowsPerWarp + 8 * h} * n + column];
                    for (uint32_t g = 0; g < 8; ++g) f(even + 4 * g, odd + 4 * g, row + size_t{g} * n);
                }
            }
        }
    };
    // Halves: accumulator e of a lane, two by two in a register.
    auto place = [n](uint32_t e, uint32_t lane) {
        return (lane / 4 + 8 * (e / 2 % 2)) * n + 8 * (e / 4) + 2 * (lane % 4) + e % 2;
    };
    auto for_accumulators = [&](auto f) {
        for (uint32_t w = 0; w < kWarpgroupWarps; ++w) {
            Warp& warp = *cta.warps[first_warp + w];
            for (uint32_t e = 0; e < n / 2; ++e) f(warp, e, &d[w * kRowsPerWarp * n]);
        }
    };
    if (product.accumulate && data.half_accumulators) {
        for_accumulators([&](Warp& warp, uint32_t e, float* rows) {
            const auto* halves = warp.lanes<uint16_t>(i.list[0][e / 2]) + e % 2;
            for (uint32_t lane = 0; lane < kWarpSize; ++lane) rows[place(e, lane)] = f16_to_float(halves[2 * lane]);
        });
    } else if (product.accumulate) {
        for_rows([](const float* even, const float* odd, float* row) {
            Float4 x, y;
            std::memcpy(&x, even, sizeof x);
            std::memcpy(&y, odd, sizeof y);
            const Float8 columns = __builtin_shufflevector(x, y, 0, 4, 1, 5, 2, 6, 3, 7);
            std::memcpy(row, &columns, sizeof columns);
        });
    }
    multiply_accumulate(a.data(), b.data(), d.data(), 64, n, depth, n, product.accumulate);
    if (data.half_accumulators) {
        for_accumulators([&](Warp& warp, uint32_t e, const float* rows) {
            auto* halves = warp.lanes<uint16_t>(i.list[0][e / 2]) + e % 2;
            for (uint32_t lane = 0; lane < kWarpSize; ++lane) halves[2 * lane] = float_to_f16(rows[place(e, lane)]);
        });
    } else {
        for_rows([](float* even, float* odd, const float* row) {
            Float8 columns;
            std::memcpy(&columns, row, sizeof columns);
            const Float4 x = __builtin_shufflevector(columns, columns, 0, 2, 4, 6);
            const Float4 y = __builtin_shufflevector(columns, columns, 1, 3, 5, 7);
            std::memcpy(even, &x, sizeof x);
            std::memcpy(odd, &y, sizeof y);
        });
    }
    cta.machine.progressed();
}

void mark_in_flight(Warp& warp, const Instruction& i, uint32_t pc) {
    Checker& checker = warp.machine.checker;
    const auto& data = static_cast<const ProductData&>(*i.data);
    if (data.a_in_registers) {
        for (uint32_t r = 0; r < 4; ++r) {
            checker.set_in_flight(warp, i.list[1][r], Checker::InFlight::kReadByOperation, pc);
        }
    }
    for (uint32_t r = 0; r < i.list_size[0]; ++r) {
        checker.set_in_flight(warp, i.list[0][r], Checker::InFlight::kWrittenByOperation, pc);
    }
}

void clear_in_flight(Warp& warp, const Instruction& i) {
    Checker& checker = warp.machine.checker;
    const auto& data = static_cast<const ProductData&>(*i.data);
    if (data.a_in_registers) {
        for (uint32_t r = 0; r < 4; ++r) checker.clear_in_flight(warp, i.list[1][r]);
    }
    for (uint32_t r = 0; r < i.list_size[0]; ++r) checker.clear_in_flight(warp, i.list[0][r]);
}

// Registers that other instructions have read or written since the latest wgmma.fence (PTX ISA 9.7.15.7.1).
void check_fence(Warp& warp, const Instruction& i, const ProductData& data) {
    Checker& checker = warp.machine.checker;
    if (!checker.enabled()) return;
    auto check = [&](uint32_t offset, const char* what) {
        if (!warp.accessed_since_fence(offset)) return;
        checker.report_once(
            warp.pc(), warp.pc(),
            format("hazard: wgmma.fence is missing between another access of %s and wgmma\n  by CTA rank %u "
                   "warp %u at %s",
                   what, warp.cta.rank, warp.index, warp.program.where(warp.pc()).c_str()));
    };
    if (!warp.multiply.fenced) {
        checker.report_once(warp.pc(), warp.pc(),
                            format("hazard: wgmma without any wgmma.fence before it\n  by CTA rank %u warp %u at %s",
                                   warp.cta.rank, warp.index, warp.program.where(warp.pc()).c_str()));
    }
    for (uint32_t r = 0; data.a_in_registers && r < 4; ++r) check(i.list[1][r], "a register of A");
    for (uint32_t r = 0; r < i.list_size[0]; ++r) check(i.list[0][r], "an accumulator");
}

void note_forms(Forms& forms, const ProductData& data, const WarpgroupProduct& product) {
    const MatrixOperand b{wgmma_descriptor(product.b), data.b_type, data.b_mn_major, 0, data.n};
    std::string a = "registers";
    if (!data.a_in_registers) {
        a = "shared memory, " + MatrixOperand{wgmma_descriptor(product.a), data.a_type, data.a_mn_major, 0, 64}.form();
    }
    forms.note("wgmma A in " + a);
    forms.note("wgmma B in shared memory, " + b.form());
    if (data.negate_a || data.negate_b) forms.note("wgmma with a negated operand");
}

// a, b: descriptors, c: scale-d. list: 0 D, 1 A
Step multiply(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!warp.converged()) return Step::kBlock;
    const auto& data = static_cast<const ProductData&>(*i.data);
    Cta& cta = warp.cta;
    const uint32_t first_warp = warp.index / kWarpgroupWarps * kWarpgroupWarps;
    if (cta.warps.size() < first_warp + kWarpgroupWarps) {
        raise(Fault::kIllegalInstruction, "wgmma needs four warps, the last %zu of the CTA are fewer",
              cta.warps.size() - first_warp);
    }
    if (mask != kAllLanes) raise(Fault::kIllegalInstruction, "wgmma on lanes %08x", mask);
    Warpgroup& group = warpgroup_of(warp);
    WarpgroupMultiply& own = warp.multiply;
    WarpgroupProduct product;
    product.instruction = &i;
    product.a = data.a_in_registers ? 0 : warp.lanes<uint64_t>(i.a)[0];
    product.b = warp.lanes<uint64_t>(i.b)[0];
    const LaneMask scale = i.negate_predicate ? ~warp.predicate(i.c) : warp.predicate(i.c);
    product.accumulate = scale & 1;
    const MatrixOperand b{wgmma_descriptor(product.b), data.b_type, data.b_mn_major, 0, data.n};
    const uint64_t number = own.issued++;
    const size_t index = number - group.complete;
    if (index >= group.partial.size()) group.partial.resize(index + 1);
    WarpgroupProduct& shared = group.partial[index];
    if (shared.warps == 0) {
        shared = product;
    } else if (shared.instruction != &i || shared.a != product.a || shared.b != product.b ||
               shared.accumulate != product.accumulate) {
        raise(Fault::kIllegalInstruction, "the warps of a warpgroup issue different products");
    }
    ++shared.warps;

    Checker& checker = warp.machine.checker;
    check_fence(warp, i, data);
    if (checker.enabled()) {
        if (!own.has_stream) {
            own.has_stream = true;
            own.stream =
                checker.new_component(cta.cluster, format("wgmma of CTA rank %u warp %u", cta.rank, warp.index));
        }
        const AsyncAgent agent = checker.agent(warp, own.stream, static_cast<uint32_t>(own.groups.size()) + 1, true);
        b.record(checker, agent, cta);
        if (!data.a_in_registers) {
            const uint32_t row = (warp.index - first_warp) * kRowsPerWarp;
            MatrixOperand{wgmma_descriptor(product.a), data.a_type, data.a_mn_major, row, kRowsPerWarp}.record(
                checker, agent, cta);
        }
        mark_in_flight(warp, i, warp.pc());
        own.in_flight.push_back({number, &i, warp.pc()});
    }
    if (shared.warps < kWarpgroupWarps) return Step::kNext;
    if (warp.machine.forms) note_forms(*warp.machine.forms, data, product);
    if (index != 0) raise(Fault::kIllegalInstruction, "a warpgroup finishes issuing products out of order");
    Cta* owner = &cta;
    const WarpgroupProduct ready = shared;
    group.partial.pop_front();
    ++group.complete;
    warp.machine.async.submit(group.queue, [owner, first_warp, ready] { run_product(*owner, first_warp, ready); });
    warp.machine.progressed();
    return Step::kNext;
}

ElementType element_type(DecodeContext& c, const std::string& name) {
    if (name == "f16") return ElementType::kF16;
    if (name == "bf16") return ElementType::kBf16;
    if (name == "e4m3") return ElementType::kE4m3;
    if (name == "e5m2") return ElementType::kE5m2;
    c.fail("only f16, bf16 and fp8 operands are supported");
}

void decode_multiply(DecodeContext& c) {
    const std::vector<std::string>& words = c.syntax.modifiers;
    if (words.size() != 8 || words[2] != "sync" || words[3] != "aligned" || (words[5] != "f32" && words[5] != "f16")) {
        c.fail("only wgmma.mma_async.sync.aligned.m64nNk with f32 or f16 accumulators is supported");
    }
    auto data = std::make_shared<ProductData>();
    data->a_type = element_type(c, words[6]);
    data->b_type = element_type(c, words[7]);
    const bool halves = element_size(data->a_type) == 2;
    data->half_accumulators = words[5] == "f16";
    if (data->half_accumulators && data->a_type == ElementType::kBf16) c.fail("bf16 has f32 accumulators only");
    if (element_size(data->a_type) != element_size(data->b_type) || (halves && data->a_type != data->b_type)) {
        c.fail("the operands' types do not go together");
    }
    const std::string& shape = words[4];
    const size_t k_at = shape.find('k');
    if (shape.compare(0, 4, "m64n") != 0 || k_at == std::string::npos) c.fail("unknown shape");
    data->n = static_cast<uint32_t>(std::stoul(shape.substr(4, k_at - 4)));
    if (shape.substr(k_at) != (halves ? "k16" : "k32") || data->n < 8 || data->n > 256 || data->n % 8) {
        c.fail("unknown shape");
    }
    c.write_list(0, c.operand(0), 4);
    // Accumulators may be in flight already: products on the same registers follow each other.
    c.info.writes.resize(c.info.writes.size() - c.out.list_size[0]);
    if (c.out.list_size[0] != data->n / (data->half_accumulators ? 4 : 2)) c.fail("wrong number of accumulators");
    data->a_in_registers = c.operand(1).kind == SyntaxOperand::Kind::kVector;
    if (data->a_in_registers) {
        c.read_list(1, c.operand(1), 4);
        if (c.out.list_size[1] != 4) c.fail("A has four registers");
    } else {
        c.out.a = c.read(1, 8);
    }
    c.out.b = c.read(2, 8);
    c.out.c = c.read_predicate(c.operand(3), &c.out.negate_predicate);
    auto sign = [&](size_t operand) {
        const int64_t value = c.immediate(operand);
        if (value != 1 && value != -1) c.fail("a sign is 1 or -1");
        return value < 0;
    };
    auto major = [&](size_t operand) {
        const int64_t value = c.immediate(operand);
        if (value != 0 && value != 1) c.fail("a transposition is 0 or 1");
        return value == 1;
    };
    data->negate_a = sign(4);
    data->negate_b = sign(5);
    if (halves && data->a_in_registers) {
        data->b_mn_major = major(6);
    } else if (halves) {
        data->a_mn_major = major(6);
        data->b_mn_major = major(7);
    }
    c.set_role(kRoleAsyncProxy | kRoleWarpgroupMultiply);
    c.out.data = std::move(data);
    c.out.handler = multiply;
}

// .aligned: all threads of the warpgroup execute the same instruction (9.7.15.7). Two waits on the two sides of a
// branch that its warps take differently are undefined, harmless as they look.
void align(Warp& warp, const Instruction& i) {
    Warpgroup& group = warpgroup_of(warp);
    const size_t index = warp.multiply.aligned++ - group.aligned_first;
    if (index == group.aligned.size()) group.aligned.push_back({&i, 0});
    if (group.aligned[index].instruction != &i) {
        raise(Fault::kIllegalInstruction, "the warps of a warpgroup execute different wgmma instructions (.aligned)");
    }
    ++group.aligned[index].warps;
    while (!group.aligned.empty() && group.aligned.front().warps == kWarpgroupWarps) {
        group.aligned.pop_front();
        ++group.aligned_first;
    }
}

Step fence(Warp& warp, const Instruction& i, LaneMask) {
    if (!warp.converged()) return Step::kBlock;
    align(warp, i);
    warp.multiply.fenced = true;
    warp.next_fence();
    return Step::kNext;
}

void decode_fence(DecodeContext& c) {
    c.allow(1, "fence sync aligned");
    c.set_role(kRoleSynchronization);
    c.out.handler = fence;
}

Step commit_group(Warp& warp, const Instruction& i, LaneMask) {
    if (!warp.converged()) return Step::kBlock;
    align(warp, i);
    warp.multiply.groups.push_back(warp.multiply.issued);
    return Step::kNext;
}

void decode_commit(DecodeContext& c) {
    c.allow(1, "commit_group sync aligned");
    c.set_role(kRoleSynchronization);
    c.out.handler = commit_group;
}

// x: groups that may stay pending
Step wait_group(Warp& warp, const Instruction& i, LaneMask) {
    if (!warp.converged()) return Step::kBlock;
    WarpgroupMultiply& own = warp.multiply;
    Warpgroup& group = warpgroup_of(warp);
    const size_t complete = own.groups.size() - std::min<size_t>(own.groups.size(), i.x);
    const uint64_t products = complete > own.groups_waited ? own.groups[complete - 1] : 0;
    if (group.complete < products) return Step::kBlock;
    align(warp, i);
    if (complete <= own.groups_waited) return Step::kNext;
    group.queue.run_through(products);
    own.groups_waited = complete;
    Checker& checker = warp.machine.checker;
    if (own.has_stream) checker.complete(warp, kAllLanes, own.stream, static_cast<uint32_t>(complete));
    bool cleared = false;
    while (!own.in_flight.empty() && own.in_flight.front().product < products) {
        clear_in_flight(warp, *own.in_flight.front().instruction);
        own.in_flight.pop_front();
        cleared = true;
    }
    if (cleared) {
        for (const WarpgroupMultiply::InFlight& rest : own.in_flight) mark_in_flight(warp, *rest.instruction, rest.pc);
    }
    return Step::kNext;
}

std::string describe_wait_group(const Warp& warp, const Instruction&) {
    const Warpgroup& group = warp.cta.warpgroups[warp.index / kWarpgroupWarps];
    return format(
        "waits for products that not all four warps of its warpgroup have issued: %llu are complete, it has "
        "issued %llu",
        static_cast<unsigned long long>(group.complete), static_cast<unsigned long long>(warp.multiply.issued));
}

void decode_wait(DecodeContext& c) {
    c.allow(1, "wait_group sync aligned");
    c.out.x = static_cast<uint32_t>(c.immediate(0));
    c.set_role(kRoleSynchronization | (c.out.x == 0 ? kRoleWarpgroupWaitAll : 0u));
    c.info.describe_wait = describe_wait_group;
    c.out.handler = wait_group;
}

}  // namespace

void register_wgmma(OpcodeTable& table) {
    table.add("wgmma.mma_async", decode_multiply);
    table.add("wgmma.fence", decode_fence);
    table.add("wgmma.commit_group", decode_commit);
    table.add("wgmma.wait_group", decode_wait);
}

}  // namespace ptx_emulator
