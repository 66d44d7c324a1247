from shared import tell
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CheckpointCallback

agent = PPO("MlpPolicy", "CartPole-v1", seed=1, device="cpu", n_steps=128, batch_size=64)
agent.learn(2048, callback=CheckpointCallback(256, "checkpoints"))
agent.save("model")
PPO.load("model")
tell(agent.policy, 0.0, 0.0)
