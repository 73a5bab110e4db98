#!/usr/bin/env bash
# Measures a table of the documentation again: scripts/bench/reproduce.sh SECTION
# Each function has the commands of one section of a page. Without a section, prints their names.
set -eo pipefail
cd "$(dirname "$0")/../.."

# docs/benchmarks.md

four-gpus-a-node() {
    nvidia-cuda-mps-control -d
    export CUDA_VISIBLE_DEVICES=0,1,2,3,0,1,2,3 XLA_PYTHON_CLIENT_MEM_FRACTION=0.4
    for ours in "delta --steps 5" "zero++-paper --steps 4"; do
        zerojax emulate --nodes 2 --gpus-per-node 4 --rate 10gbit -- \
            scripts/bench/train.py --nodes 2 --local 4 --variants $ours
    done
    for peers in "train_fsdp2.py --peers hsdp fsdp2" "train_deepspeed.py --peers ds-zero++ ds-zero3"; do
        zerojax emulate --nodes 2 --gpus-per-node 4 --rate 10gbit -- \
            sh -c "python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 --node-rank \$NODE_RANK \
                --master-addr \$MASTER_ADDR --master-port \$MASTER_PORT scripts/bench/$peers --steps 3 --warm-up 2"
    done
    echo quit | nvidia-cuda-mps-control
}

faster-links() {
    rates="--rates 100gbit 40gbit 25gbit" model="--layers 20 --d-model 3072 --sequences 1" cluster="--nodes 2 --gpus-per-node 1"
    zerojax emulate $cluster --rate 100gbit -- \
        scripts/bench/train.py --nodes 2 --local 1 $model --no-trace --variants delta zero++-paper $rates
    peers() {
        for peers in "train_fsdp2.py --peers $1" "train_deepspeed.py --peers ds-zero++"; do
            zerojax emulate $cluster --rate 100gbit -- \
                sh -c "python -m torch.distributed.run --nnodes 2 --nproc-per-node $2 --node-rank \$NODE_RANK \
                    --master-addr \$MASTER_ADDR --master-port \$MASTER_PORT scripts/bench/$peers $model --steps 3 --warm-up 2 $rates"
        done
    }
    peers "hsdp fsdp2" 1  # leaves NCCL alone; with the same variables:
    export NCCL_P2P_NET_CHUNKSIZE=2097152 NCCL_COMM_SPLIT_SHARE_RESOURCES=0
    NCCL_SOCKET_NTHREADS=2 NCCL_BUFFSIZE=16777216 peers "hsdp fsdp2" 1
    NCCL_SOCKET_NTHREADS=0 NCCL_BUFFSIZE=4194304 NCCL_P2P_NET_CHUNKSIZE=131072 zerojax emulate $cluster --rate 100gbit -- \
        scripts/bench/train.py --nodes 2 --local 1 $model --no-trace --variants delta zero++-paper $rates

    unset NCCL_P2P_NET_CHUNKSIZE NCCL_COMM_SPLIT_SHARE_RESOURCES
    rates="--rates 100gbit 40gbit 25gbit 10gbit" model="--layers 24 --d-model 2048 --sequences 1" cluster="--nodes 2 --gpus-per-node 2"
    nvidia-cuda-mps-control -d
    export CUDA_VISIBLE_DEVICES=0,1,0,1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.4
    ours="scripts/bench/train.py --nodes 2 --local 2 $model --no-trace --variants delta zero++-paper"
    zerojax emulate $cluster --rate 100gbit -- $ours --rates 100gbit 40gbit 25gbit
    zerojax emulate $cluster --rate 10gbit -- $ours
    NCCL_SOCKET_NTHREADS=1 NCCL_P2P_NET_CHUNKSIZE=2097152 NCCL_COMM_SPLIT_SHARE_RESOURCES=0 peers hsdp 2
    for twice in 1 2; do
        CUDA_VISIBLE_DEVICES=0 scripts/bench/train.py --nodes 1 --local 1 --variants zero3 --no-trace --steps 40 $model &
    done  # the compute
    wait
}

one-gigabit() {
    emulate="zerojax emulate --nodes 2 --gpus-per-node 1 --rate 1000gbit --"
    train="scripts/bench/train.py --nodes 2 --local 1 --sequences 4 --steps 8 --seconds 12"
    ours() {
        CUDA_VISIBLE_DEVICES=0,1 $emulate $train --variants local --rates 1000gbit 100mbit 1gbit --profile build/trace --json build/local.json
        scripts/bench/draw_trace.py build/trace/local/process0 --picture docs/local-step.png
        CUDA_VISIBLE_DEVICES=0,1 $emulate $train --variants delta --no-trace --rates 1000gbit 1gbit 100mbit --json build/delta.json
    }
    others() {
        CUDA_VISIBLE_DEVICES=2,3 $emulate sh -c 'python -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank $NODE_RANK \
            --master-addr $MASTER_ADDR --master-port $MASTER_PORT scripts/bench/train_fsdp2.py --peers hsdp --sequences 4 --warm-up 2 \
            --steps 1 --rates 1000gbit 1gbit --json build/hsdp.json'
        CUDA_VISIBLE_DEVICES=2,3 $emulate $train --variants zero3 --no-trace --rates 1000gbit 1gbit --json build/zero3.json
    }
    ours & others & wait
}

eight-micro-batches() {
    zerojax emulate --nodes 2 --gpus-per-node 2 --rate 10gbit -- \
        scripts/bench/train.py --nodes 2 --local 2 --steps 4 --variants delta-breadth-x8 --remat none
    zerojax emulate --nodes 2 --gpus-per-node 1 --rate 10gbit -- \
        scripts/bench/train.py --nodes 2 --local 1 --steps 3 --no-trace \
            --variants delta-breadth-x8 zero++-breadth-x8 zero3-breadth-x8 delta-x8 zero++-x8
    for gpus in 2 1; do
        zerojax emulate --nodes 2 --gpus-per-node $gpus --rate 10gbit -- \
            sh -c "python -m torch.distributed.run --nnodes 2 --nproc-per-node $gpus --node-rank \$NODE_RANK \
                --master-addr \$MASTER_ADDR --master-port \$MASTER_PORT \
                scripts/bench/train_fsdp2.py --peers hsdp-x8 --steps 3 --warm-up 2"
    done
}

one-host() {
    scripts/bench/train.py --nodes 1 --local 2 --sequences 4 --remat none --steps 20 --no-trace --variants zero3 --peak-tflops 989
    python -m torch.distributed.run --nproc-per-node 2 scripts/bench/train_fsdp2.py --sequences 4 --steps 20 --peers fsdp2 --peak-tflops 989
    llama="--llama --layers 32 --d-model 4096 --ffn 11008 --seq 4096 --sequences 2 --peak-tflops 989"
    scripts/bench/train.py --nodes 1 --local 4 --remat none --variants zero3 --steps 6 $llama
    python -m torch.distributed.run --nproc-per-node 4 scripts/bench/train_fsdp2.py --peers fsdp2 --steps 6 $llama
}

fp8() {
    gpt="--layers 24 --d-model 2048 --sequences 4 --peak-tflops 989"
    scripts/bench/train.py --nodes 1 --local 1 --remat none --no-trace --variants zero3 zero3-fp8 $gpt
    python -m torch.distributed.run --nproc-per-node 1 scripts/bench/train_fsdp2.py --peers fsdp2 fsdp2-fp8 $gpt
    llama="--llama --layers 8 --d-model 4096 --ffn 11008 --seq 4096 --sequences 2 --peak-tflops 989"
    scripts/bench/train.py --nodes 1 --local 1 --remat none --no-trace --variants zero3 zero3-fp8 $llama
    wide="--llama --layers 6 --d-model 5120 --ffn 13824 --seq 4096 --sequences 2 --peak-tflops 989"
    scripts/bench/train.py --nodes 1 --local 2 --remat none --no-trace --steps 16 --variants zero3-fp8 zero3 $wide
    python -m torch.distributed.run --nproc-per-node 2 scripts/bench/train_fsdp2.py --peers fsdp2-fp8 --steps 6 $wide
    export XLA_PYTHON_CLIENT_MEM_FRACTION=0.93 whole="${llama/layers 8/layers 32}"
    scripts/bench/train.py --nodes 1 --local 2 --remat none --no-trace --steps 6 --variants zero3-fp8 zero3 $whole
    python -m torch.distributed.run --nproc-per-node 2 scripts/bench/train_fsdp2.py --peers fsdp2-fp8 fsdp2 --steps 5 --warm-up 2 $whole
}

adapters() {
    llama="--llama --layers 32 --d-model 4096 --ffn 11008 --seq 4096 --sequences 2 --peak-tflops 989"
    scripts/bench/train.py --nodes 1 --local 1 --no-trace --steps 5 --remat full --variants qlora $llama
    scripts/bench/train.py --nodes 1 --local 1 --no-trace --steps 5 --remat none --variants lora lora-fp8 $llama
    peft="python -m torch.distributed.run --nproc-per-node 1 scripts/bench/train_peft.py --steps 4 --warm-up 2 $llama"
    $peft --peers qlora --checkpoint
    $peft --peers lora-compiled
    zerojax emulate --nodes 2 --gpus-per-node 1 --rate 10gbit -- \
        scripts/bench/train.py --nodes 2 --local 1 --remat none --steps 5 --no-trace --variants lora --rates 1000gbit 10gbit $llama
    XLA_PYTHON_CLIENT_MEM_FRACTION=0.93 scripts/bench/train.py --nodes 1 --local 2 --remat attention --no-trace --steps 4 --variants qlora \
        --sequences 1 --llama --layers 80 --d-model 8192 --ffn 28672 --kv-heads 8 --seq 2048 --peak-tflops 989
}

one-document() {
    scripts/bench/packed_attention.py --cases 7 8 9
    for case in "8192:1:8 --layers 4" "32768:1:2 --layers 4" "131072:1:1 --layers 8"; do
        for attention in cudnn flash_attention_4 "flash_attention_4 --fp8"; do
            scripts/bench/long_rows.py $case --remat attention --attention $attention
        done
    done
}

experts() {
    moe="--qwen3-moe --seq 4096" local="--layers 8 --sequences 4" nodes="--layers 4 --sequences 2"
    scripts/bench/train.py --nodes 1 --local 2 $moe $local --remat none --variants zero3 zero3-gathered --no-trace
    python3 -m torch.distributed.run --nproc-per-node 2 scripts/bench/train_fsdp2.py $moe $local --peers fsdp2-gathers fsdp2
    delta="--remat none --steps 6 --no-trace --variants delta --ahead"
    for rate in 25gbit 10gbit; do for layers in 4 8; do    # without --mtu frames have 1500 bytes
        zerojax emulate --nodes 2 --gpus-per-node 1 --rate $rate --mtu 9000 -- \
            scripts/bench/train.py --nodes 2 --local 1 $moe --layers $layers --sequences 2 $delta --rates $rate
    done; done
    zerojax emulate --nodes 2 --gpus-per-node 1 --rate 25gbit -- sh -c "python3 -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \
        --node-rank \$NODE_RANK --master-addr \$MASTER_ADDR --master-port \$MASTER_PORT scripts/bench/train_fsdp2.py $moe $nodes \
        --peers hsdp-gathers fsdp2-gathers --warm-up 1 --steps 2 --rates 25gbit"
    nvidia-cuda-mps-control -d
    for rate in 25gbit 10gbit; do for layers in 4 8; do
        CUDA_VISIBLE_DEVICES=0,1,0,1 XLA_PYTHON_CLIENT_MEM_FRACTION=0.42 \
            zerojax emulate --nodes 2 --gpus-per-node 2 --rate $rate --mtu 9000 -- \
            scripts/bench/train.py --nodes 2 --local 2 $moe --layers $layers --sequences 1 $delta --rates $rate
    done; done
    echo quit | nvidia-cuda-mps-control
}

host-memory() {
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=120 scripts/bench/train.py --nodes 1 --local 2 --llama --d-model 5120 --layers 40 --ffn 13824 --seq 4096 \
        --sequences 1 --no-trace --steps 3 --variants zero3-host-breadth-x8-bf16-moments
    export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=110 blocks="--llama --d-model 4096 --layers 32 --seq 4096 --sequences 1"
    for moments in "" -bf16-moments -float8-moments; do
        scripts/bench/train.py --nodes 1 --local 1 $blocks --no-trace --steps 5 --variants zero3-host-breadth-x8$moments
    done
    python3 -m torch.distributed.run scripts/bench/train_deepspeed.py $blocks --checkpoint --peers ds-offload-x8 --warm-up 2 --steps 3
    scripts/bench/host_activations.py
}

long-rows() {
    scripts/bench/long_rows.py
    export XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=100 XLA_CLIENT_MEM_FRACTION=0.95
    scripts/bench/long_rows.py 131072:1:1 --adapters --layers 8
    scripts/bench/long_rows.py 131072:1:1 --adapters --layers 32 --steps 3 --remat attention
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=160 scripts/bench/long_rows.py 524288:1:1 --adapters --layers 32 --steps 0    # 13 minutes
    XLA_CLIENT_MEM_FRACTION=0.545 scripts/bench/long_rows.py 1048576:2:1 --adapters --layers 8 --steps 0
    for attention in cudnn flash_attention_4; do
        scripts/bench/long_rows.py 524288:1:1 --adapters --layers 1 --steps 1 --attention $attention
    done
    for more in "--layers 2" "--layers 8 --host-activations 0.83" "--layers 32 --host-activations 0.83"; do  # the last takes 22 minutes
        XLA_CLIENT_MEM_FRACTION=0.535 XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=109 scripts/bench/long_rows.py 1048576:2:1 --adapters --steps 0 \
            --attention flash_attention_4 --compile-first $more
    done
    XLA_CLIENT_MEM_FRACTION=0.535 XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=219 scripts/bench/long_rows.py 524288:1:1 --layers 32 --steps 0 \
        --host optimizer weights activations --moments bfloat16    # 14 minutes
    for remat in attention none "attention --fp8"; do scripts/bench/long_rows.py 131072:2:1 --layers 8 --remat $remat; done
    shape="--llama --d-model 4096 --layers 8 --ffn 14336 --kv-heads 8 --seq 65536 --sequences 1 --steps 3"
    for remat in full attention none; do
        scripts/bench/train.py --nodes 1 --local 2 $shape --no-trace --variants zero3-sp --remat $remat
    done
    for recompute in --checkpoint ""; do
        python3 -m torch.distributed.run --nproc-per-node 2 scripts/bench/train_fsdp2.py $shape --warm-up 2 \
            --attention cudnn $recompute --peers fsdp2-cp
    done  # and both with --seq 196608
}

# docs/quality.md

formats() {
    scripts/bench/convergence.py scripts/bench/convergence.toml --seeds 0 1 2 \
        --variants zero3 delta-stochastic delta-nearest zero++-256 zero++-128 delta-stochastic-unrotated \
            delta-nearest-feedback delta-stochastic-int8 zero3-fp8 delta-fp8 \
        --json docs/measured/quality-124m-2x1.json --picture docs/quality.png
}

state-in-every-node() {
    scripts/bench/convergence.py scripts/bench/convergence.toml --seeds 0 1 2 \
        --variants zero3 delta-stochastic delta-node delta-node-int8 delta-node-nearest-feedback \
        --json docs/measured/quality-124m-state-in-every-node.json
}

formats-800-steps() {
    scripts/bench/convergence.py scripts/bench/convergence.toml --mesh.nodes 1 --train.steps 800 --train.batch-size 24 \
        --train.eval-every 200 --optimizer.warmup-steps 240 --seeds 0 1 2 --variants zero3 zero3-fp8 \
        --json docs/measured/quality-124m-800-steps.json
}

moments() {
    series() {
        scripts/bench/convergence.py scripts/bench/convergence.toml --mesh.nodes 1 --train.accumulate 4 --train.steps 250 \
            --optimizer.warmup-steps 80 --seeds 0 1 2 --json docs/measured/quality-moments$1.json --variants "${@:2}"
    }
    series "" zero3 zero3-bf16-moments
    series -float8 {zero3,zero3-float8-moments}{,@1.2e-3}
}

formats-350m() {
    scripts/bench/convergence.py scripts/bench/convergence.toml --model.layers 24 --model.d-model 1024 --model.heads 16 \
        --train.steps 250 --train.eval-every 50 --optimizer.warmup-steps 80 --seeds 0 \
        --variants zero3 delta-stochastic zero++-256 \
        --json docs/measured/quality-350m-2x1.json
}

formats-nodes-of-two() {
    nvidia-cuda-mps-control -d
    CUDA_VISIBLE_DEVICES=0,1,0,1 XLA_PYTHON_CLIENT_PREALLOCATE=false zerojax emulate --nodes 2 --gpus-per-node 2 --rate none -- \
        scripts/bench/convergence.py scripts/bench/convergence.toml --mesh.local 2 --seeds 0 1 2 3 4 \
        --variants zero3 delta-stochastic zero++-256 zero++-stochastic zero++-rotated zero++-int8-local \
        zero++-int8-local-rotated --json docs/measured/quality-124m-2x2.json
}

local-updates-exact() {
    scripts/bench/convergence.py scripts/bench/convergence.toml --seeds 0 --train.steps 800 --train.eval-every 200 \
        --optimizer.warmup-steps 240 --train.batch-size 24 --variants zero3 local-64 local-64-exact
}

experts-quality() {
    scripts/bench/convergence.py scripts/bench/convergence-moe.toml --text 40 --kinds Python --folder build/convergence-moe \
        --seeds 0 1 2 --variants zero3 delta-stochastic zero++-int8-local-rotated --json docs/measured/quality-moe-2x1.json
}

local-updates-rates() {
    rates() {
        scripts/bench/convergence.py scripts/bench/convergence.toml --optimizer.name muon --optimizer.beta1 0.95 --train.eval-batches 64 \
            --json docs/measured/quality-local-$1.json "${@:2}"
    }
    rates rates-800 --seeds 0 --train.batch-size 24 --train.steps 800 --train.eval-every 400 --optimizer.warmup-steps 240 --variants \
        zero3@1.2e-3 zero3@2.4e-3 zero3@4.8e-3 local-64@1.2e-3 local-64@2.4e-3 local-64@4.8e-3 local-64-sum@2.4e-3
    rates rates-3200 --seeds 0 1 --train.batch-size 24 --train.steps 3200 --train.eval-every 800 --optimizer.warmup-steps 400 --variants \
        zero3@2.4e-3 local-64-sum@2.4e-3 local-16-sum@2.4e-3
    rates rates-1600 --seeds 0 --train.steps 1600 --train.eval-every 400 --optimizer.warmup-steps 300 --variants zero3@3.4e-3 local-64-sum@3.4e-3
    rates 11m --seeds 0 1 2 --train.steps 2400 --train.eval-every 600 --optimizer.warmup-steps 300 --data.tokenizer byte --model.vocab-size 256 \
        --model.layers 6 --model.d-model 384 --model.heads 6 --variants zero3@3e-3 local-64-sum@3e-3 local-64@3e-3 local-16-sum@3e-3 \
        local-64-sum@4.2e-3 zero3@4.2e-3 local-64-sum@6e-3 zero3@6e-3 local-64-sum@8.4e-3 zero3@8.4e-3
}

local-updates-tuned() {
    scripts/bench/machine_text.py build/text.jsonl --megabytes 300
    zerojax train scripts/bench/convergence.toml --mesh.nodes 1 --mesh.local 2 --data.source build/text.jsonl --train.steps 800 \
        --train.batch-size 96 --train.eval-every 400 --optimizer.warmup-steps 120 --run-dir build/base
    tuned() {
        scripts/bench/convergence.py scripts/bench/convergence.toml --text 0 --data.source build/text.jsonl --init-from build/base \
            --train.steps 400 --train.batch-size 48 --train.eval-every 100 --train.eval-batches 32 --optimizer.warmup-steps 40 \
            --optimizer.learning-rate 3e-4 --seeds 0 1 2 --json docs/measured/quality-local-$1.json --variants "${@:2}"
    }
    muon="--optimizer.name muon --optimizer.beta1 0.95"
    tuned tuned-adamw zero3@1.2e-3 local-{64,128}-sum@{6e-4,3e-4} local-16-sum@{6e-4,1.2e-3} --tuned
    tuned tuned-muon zero3@{1.2e-3,2.4e-3} local-{64,128}-sum@{1.2e-3,6e-4} local-16-sum@1.2e-3 --tuned $muon
    tuned four-nodes zero3@2.4e-3 local-64-sum@1.2e-3 --mesh.nodes 4 $muon
}

fine-tuning() {
    scripts/bench/machine_text.py build/base.jsonl --kinds Python --megabytes 150
    zerojax train scripts/bench/convergence.toml --data.source build/base.jsonl --run-dir build/base --checkpoint.every 0
    scripts/bench/convergence.py scripts/bench/fine_tuning.toml --init-from build/base --folder build/fine-tuning \
        --kinds "C and C++" --text 60 --seeds 0 1 2 \
        --variants zero3 deltas-int2 weights-int2 deltas-int4 weights-int4 weights-fp6 weights-int8 deltas-int8 \
        --json docs/measured/fine-tuning-124m-2x1.json --picture docs/fine-tuning.png
}

# docs/host-memory.md

host-memory-backward() {
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=86 scripts/bench/train.py --nodes 1 --local 1 --llama --d-model 4096 --layers 32 \
        --ffn 11008 --seq 4096 --sequences 1 --no-trace --steps 3 --variants zero3-host-breadth-x8-backward
    XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=110 scripts/bench/train.py --nodes 1 --local 1 --llama --d-model 5120 --layers 40 \
        --ffn 13824 --seq 4096 --sequences 1 --no-trace --steps 3 --variants zero3-host-breadth-x8-bf16-moments-backward
}

host-memory-local() {
    for variant in local local-host; do
        XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=100 scripts/bench/train.py --nodes 2 --local 1 --sequences 20 --no-trace --variants $variant
    done
}

# docs/clusters.md

nccl() {
    zerojax emulate --nodes 2 --gpus-per-node 1 --rate 100gbit -- scripts/bench/train.py --nodes 2 --local 1 --layers 20 \
        --d-model 3072 --sequences 1 --no-trace --variants delta zero++-paper --rates 100gbit 40gbit 25gbit
    export NCCL_SOCKET_NTHREADS=4 NCCL_BUFFSIZE=4194304 NCCL_P2P_NET_CHUNKSIZE=1048576  # and so on, then the same again
    zerojax emulate --nodes 2 --gpus-per-node 1 --rate 100gbit -- zerojax links --sizes 1 16 32 64
}

# docs/posttrain.md

grpo() {
    zerojax emulate --nodes 2 --gpus-per-node 1 --rate 10gbit -- \
        scripts/bench/grpo.py --nodes 2 --local 1 --presets delta zero3 zero++-paper --repeats 2 --json docs/measured/grpo.json
    zerojax emulate --nodes 2 --gpus-per-node 1 --rate 10gbit -- \
        scripts/bench/grpo.py --nodes 2 --local 1 --presets delta zero3 zero++-paper --repeats 1 --accumulate 1 --layers 32 --d-model 4096 --vocab 32000
}

if [ $# != 1 ] || ! declare -F -- "$1" > /dev/null; then
    echo "usage: $0 SECTION, one of: $(sed -n 's/^\([a-z0-9-]*\)() {$/\1/p' "$0" | paste -sd ' ')" >&2
    exit 2
fi
"$1"
